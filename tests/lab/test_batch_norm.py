"""Batch norms of all runs by kernels of our own equal torch's, run by run, there and back."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import batch_norm

from lab.small import gpu
from mooring.lab.fleet.gpu.batch_norm import fused_batch_norm, supports_batch_norm

RUNS = 3
TOLD = {"momentum": 0.1, "eps": 1e-5}
CASES = {
    "images": (10, 21, 32, 32),
    "more channels than a tile has columns": (4, 600, 3, 3),
    "few places": (2, 170, 4, 4),
    "rows": (30, 7),
    "series": (5, 5, 6),
}


def made(shape: tuple[int, ...], dtype: torch.dtype, far: float = 0.0) -> dict[str, Tensor]:
    """Images of all runs whose channels lie apart, and what belongs to each run."""
    torch.manual_seed(0)
    size, channels = (RUNS * shape[0], *shape[1:]), shape[1]
    x = torch.randn(size, device="cuda") + torch.randn(channels, device="cuda").view(-1, *[1] * (len(shape) - 2))
    own = {name: torch.randn(RUNS, channels, device="cuda") for name in ("weight", "bias", "mean")}
    return {"x": (x + far).to(dtype), **own, "var": torch.rand(RUNS, channels, device="cuda") + 0.5}


def by_torch(told: dict[str, Tensor], *, training: bool) -> Tensor:
    """One run after the other, in float64; the running statistics go along."""
    each = zip(told["x"].chunk(RUNS), *(told[name] for name in ("mean", "var", "weight", "bias")), strict=True)
    return torch.cat([batch_norm(x, m, v, w, b, training, **TOLD) for x, m, v, w, b in each])


def apart(mine: Tensor, exact: Tensor) -> float:
    """How far, relative to the norm."""
    return float((mine.double() - exact).detach().norm() / exact.detach().norm())


def test_a_cpu_has_torchs_own() -> None:
    assert not supports_batch_norm(torch.zeros(2, 3))


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", CASES.values(), ids=CASES)
def test_results_gradients_and_statistics_equal_torchs(shape, training, dtype) -> None:
    told = made(shape, dtype)
    exact = {name: tensor.double() for name, tensor in told.items()}
    for tensors in (told, exact):
        for name in ("x", "weight", "bias"):
            tensors[name].requires_grad_()
    seen = torch.arange(RUNS, device="cuda")
    running = (told["mean"], told["var"], seen)
    out = fused_batch_norm(told["x"], told["weight"], told["bias"], running, RUNS, training=training, **TOLD)
    assert seen.tolist() == [run + training for run in range(RUNS)]
    ref = by_torch(exact, training=training)
    g = torch.randn_like(out)
    mine = torch.autograd.grad(out, [told[name] for name in ("x", "weight", "bias")], g)
    theirs = torch.autograd.grad(ref, [exact[name] for name in ("x", "weight", "bias")], g.double())
    close = 1e-5 if dtype == torch.float32 else 4e-3  # what is stored is rounded to seven bits
    assert out.dtype == dtype
    assert apart(out, ref) < close
    assert apart(mine[0], theirs[0]) < close
    assert max(apart(one, other) for one, other in zip(mine[1:], theirs[1:], strict=True)) < 1e-4
    assert max(apart(told[name], exact[name]) for name in ("mean", "var")) < 1e-5


@gpu
def test_where_nothing_goes_back_a_kernel_gives_the_same() -> None:
    told = made((4, 21, 8, 8), torch.float32)
    exact = {name: tensor.double() for name, tensor in told.items()}
    running = (told["mean"], told["var"], torch.zeros(RUNS, dtype=torch.int64, device="cuda"))
    out = fused_batch_norm(told["x"], told["weight"], told["bias"], running, RUNS, training=False, **TOLD)
    assert apart(out, by_torch(exact, training=False)) < 1e-5


@gpu
def test_one_value_of_a_channel_has_no_variance_and_is_refused_as_torch_does() -> None:
    told = made((1, 5), torch.float32)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        fused_batch_norm(told["x"], told["weight"], told["bias"], None, RUNS, training=True, **TOLD)


@gpu
def test_values_far_from_0_keep_their_variance() -> None:
    told = made((4, 21, 8, 8), torch.float32, far=1000.0)
    out = fused_batch_norm(told["x"], None, None, None, RUNS, training=True, **TOLD)
    exact = torch.cat([batch_norm(x, None, None, None, None, True) for x in told["x"].double().chunk(RUNS)])
    assert apart(out, exact) < 1e-3  # x itself has seven digits, four of which are left


@gpu
def test_what_is_not_a_number_stays_in_its_run() -> None:
    told = made((4, 21, 8, 8), torch.float32)
    told["x"][5, 3, 2, 2] = float("nan")
    told["x"].requires_grad_()
    out = fused_batch_norm(told["x"], told["weight"], told["bias"], None, RUNS, training=True, **TOLD)
    (g,) = torch.autograd.grad(out.square().sum(), told["x"])
    for found in (out, g):
        assert found.isfinite().reshape(RUNS, -1).all(1).tolist() == [True, False, True]
