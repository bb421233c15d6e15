"""The batch norm kernels equal torch's batch norm of each run, forward and backward."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import batch_norm

from laboratory.small import gpu
from mooring_lab.fleet.gpu.batch_norm import fused_batch_norm, supports_batch_norm

RUNS = 3
SETTINGS = {"momentum": 0.1, "eps": 1e-5}
CASES = {
    "images": (10, 21, 32, 32),
    "more channels than a tile has columns": (4, 600, 3, 3),
    "few places": (2, 170, 4, 4),
    "rows": (30, 7),
    "series": (5, 5, 6),
}


def random_inputs(shape: tuple[int, ...], dtype: torch.dtype, far: float = 0.0) -> dict[str, Tensor]:
    """Return inputs of all runs with different channel means, and the parameters of each run."""
    torch.manual_seed(0)
    size, channels = (RUNS * shape[0], *shape[1:]), shape[1]
    x = torch.randn(size, device="cuda") + torch.randn(channels, device="cuda").view(-1, *[1] * (len(shape) - 2))
    own = {name: torch.randn(RUNS, channels, device="cuda") for name in ("weight", "bias", "mean")}
    return {"x": (x + far).to(dtype), **own, "var": torch.rand(RUNS, channels, device="cuda") + 0.5}


def by_torch(tensors: dict[str, Tensor], *, training: bool) -> Tensor:
    """Apply torch's batch norm to one run after the other and update the running statistics."""
    runs = zip(tensors["x"].chunk(RUNS), *(tensors[name] for name in ("mean", "var", "weight", "bias")), strict=True)
    return torch.cat([batch_norm(x, m, v, w, b, training, **SETTINGS) for x, m, v, w, b in runs])


def relative_error(actual: Tensor, exact: Tensor) -> float:
    return float((actual.double() - exact).detach().norm() / exact.detach().norm())


def test_cpu_is_not_supported() -> None:
    assert not supports_batch_norm(torch.zeros(2, 3))


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", CASES.values(), ids=CASES)
def test_outputs_gradients_and_statistics_equal_torchs(shape, training, dtype) -> None:
    tensors = random_inputs(shape, dtype)
    exact = {name: tensor.double() for name, tensor in tensors.items()}
    for own in (tensors, exact):
        for name in ("x", "weight", "bias"):
            own[name].requires_grad_()
    batches = torch.arange(RUNS, device="cuda")
    running = (tensors["mean"], tensors["var"], batches)
    out = fused_batch_norm(
        tensors["x"], tensors["weight"], tensors["bias"], running, RUNS, training=training, **SETTINGS
    )
    assert batches.tolist() == [run + training for run in range(RUNS)]
    ref = by_torch(exact, training=training)
    g = torch.randn_like(out)
    actual = torch.autograd.grad(out, [tensors[name] for name in ("x", "weight", "bias")], g)
    expected = torch.autograd.grad(ref, [exact[name] for name in ("x", "weight", "bias")], g.double())
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3  # bfloat16 has a mantissa of seven bits
    assert out.dtype == dtype
    assert relative_error(out, ref) < tolerance
    assert relative_error(actual[0], expected[0]) < tolerance
    assert max(relative_error(a, b) for a, b in zip(actual[1:], expected[1:], strict=True)) < 1e-4
    assert max(relative_error(tensors[name], exact[name]) for name in ("mean", "var")) < 1e-5


@gpu
def test_inference_without_gradients_equals_torchs() -> None:
    tensors = random_inputs((4, 21, 8, 8), torch.float32)
    exact = {name: tensor.double() for name, tensor in tensors.items()}
    running = (tensors["mean"], tensors["var"], torch.zeros(RUNS, dtype=torch.int64, device="cuda"))
    out = fused_batch_norm(tensors["x"], tensors["weight"], tensors["bias"], running, RUNS, training=False, **SETTINGS)
    assert relative_error(out, by_torch(exact, training=False)) < 1e-5


@gpu
def test_one_value_per_channel_is_refused_as_by_torch() -> None:
    tensors = random_inputs((1, 5), torch.float32)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        fused_batch_norm(tensors["x"], tensors["weight"], tensors["bias"], None, RUNS, training=True, **SETTINGS)


@gpu
def test_variance_of_values_far_from_zero_is_accurate() -> None:
    tensors = random_inputs((4, 21, 8, 8), torch.float32, far=1000.0)
    out = fused_batch_norm(tensors["x"], None, None, None, RUNS, training=True, **SETTINGS)
    exact = torch.cat([batch_norm(x, None, None, None, None, True) for x in tensors["x"].double().chunk(RUNS)])
    assert relative_error(out, exact) < 1e-3  # of the seven digits of x, four remain


@gpu
def test_nan_stays_in_its_run() -> None:
    tensors = random_inputs((4, 21, 8, 8), torch.float32)
    tensors["x"][5, 3, 2, 2] = float("nan")
    tensors["x"].requires_grad_()
    out = fused_batch_norm(tensors["x"], tensors["weight"], tensors["bias"], None, RUNS, training=True, **SETTINGS)
    (g,) = torch.autograd.grad(out.square().sum(), tensors["x"])
    for values in (out, g):
        assert values.isfinite().reshape(RUNS, -1).all(1).tolist() == [True, False, True]
