"""Reduced precision on a GPU stays as close to float64 as its mantissa allows; kernels equal torch's layers."""

import pytest
import torch
from torch.nn.functional import conv2d, max_pool2d

from laboratory.small import class_stream, gpu, spec_for
from mooring.errors import MooringError
from mooring_lab.fleet.fleet import Fleet
from mooring_lab.fleet.gpu.fused_convolutions import ConvolutionSpec, fused_convolutions
from mooring_lab.model.precision import tf32_mode


def test_gpu_precisions_are_refused_on_a_cpu() -> None:
    stream = class_stream()
    for dtype in ("tf32", "bf16"):
        with pytest.raises(MooringError, match="is for a GPU"):
            Fleet([spec_for("plain", stream, dtype=dtype)], stream)


CASES = [
    (3, 64, 32, 3, 1, 1),
    (64, 64, 16, 3, 1, 1),
    (64, 128, 8, 3, 2, 1),
    (21, 42, 9, 1, 2, 0),
    (170, 85, 5, 3, 1, 1),
    (21, 21, 32, 3, 1, 1),
    (42, 85, 8, 3, 1, 1),
    (170, 170, 4, 3, 1, 1),
    (85, 13, 16, 1, 1, 0),
]


def by_torch(x, weights, biases, specs, runs):
    """Compute the same with torch's layers, run by run, in float64."""
    outs = []
    for run, images in enumerate(x.chunk(runs)):
        for spec, weight, bias in zip(specs, weights, biases, strict=True):
            images = conv2d(images, weight[run], bias[run], stride=spec.stride, padding=spec.padding)
            images = images.relu() if spec.relu else images
            images = max_pool2d(images, 2) if spec.pool else images
        outs.append(images)
    return torch.cat(outs)


def random_convolutions(
    channels: int, size: int, specs: list[tuple[int, int, ConvolutionSpec]], dtype: torch.dtype, runs: int, batch: int
) -> tuple[torch.Tensor, tuple[ConvolutionSpec, ...], list[torch.Tensor], list[torch.Tensor]]:
    """Return images, specs, weights and biases of consecutive convolutions."""
    torch.manual_seed(0)
    x = torch.randn(runs * batch, channels, size, size, device="cuda").to(dtype).requires_grad_()
    weights, biases = [], []
    for outputs, kernel, _ in specs:
        scale = 1.5 / (channels * kernel * kernel) ** 0.5
        weights.append((scale * torch.randn(runs, outputs, channels, kernel, kernel, device="cuda")).requires_grad_())
        biases.append(torch.randn(runs, outputs, device="cuda").requires_grad_())
        channels = outputs
    return x, tuple(spec for *_, spec in specs), weights, biases


def relative_errors(
    channels: int,
    size: int,
    specs: list[tuple[int, int, ConvolutionSpec]],
    dtype: torch.dtype,
    runs: int = 3,
    batch: int = 4,
) -> list[float]:
    """Return the relative errors of consecutive convolutions and of their gradients."""
    x, plan, weights, biases = random_convolutions(channels, size, specs, dtype, runs, batch)
    with tf32_mode("tf32"):
        out = fused_convolutions(x, plan, weights, biases)
        g = torch.randn_like(out) / 100
        actual = [out, *torch.autograd.grad(out, (x, *weights, *biases), g)]
    exact = [t.detach().double().requires_grad_() for t in (x, *weights, *biases)]
    ref = by_torch(exact[0], exact[1 : 1 + len(specs)], exact[1 + len(specs) :], plan, runs)
    expected = [ref, *torch.autograd.grad(ref, exact, g.double())]
    return [float((a.double() - b).detach().norm() / b.detach().norm()) for a, b in zip(actual, expected, strict=True)]


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_one_convolution_and_its_gradients_equal_torchs(case, dtype) -> None:
    channels, outputs, size, kernel, stride, padding = case
    errors = relative_errors(channels, size, [(outputs, kernel, ConvolutionSpec(stride, padding))], dtype)
    assert max(errors) < (2e-3 if dtype == torch.float32 else 2e-2)  # mantissas of ten and seven bits


CONVOLUTIONS = {
    "a ReLU": [(64, 3, ConvolutionSpec(1, 1, relu=True))],
    "a pool alone": [(64, 3, ConvolutionSpec(1, 1, pool=True))],
    "one after the other": [
        (64, 3, ConvolutionSpec(1, 1, relu=True)),
        (64, 3, ConvolutionSpec(1, 1)),
        (128, 3, ConvolutionSpec(1, 1, relu=True)),
    ],
    "pools between": [
        (64, 3, ConvolutionSpec(1, 1, relu=True)),
        (64, 3, ConvolutionSpec(1, 1, relu=True, pool=True)),
        (128, 3, ConvolutionSpec(1, 1, relu=True)),
        (128, 3, ConvolutionSpec(1, 1, relu=True, pool=True)),
        (256, 3, ConvolutionSpec(1, 1, relu=True)),
        (256, 3, ConvolutionSpec(1, 1, relu=True, pool=True)),
    ],
    "odd widths and strides": [
        (21, 3, ConvolutionSpec(2, 1, relu=True)),
        (42, 1, ConvolutionSpec(1, 0, relu=True)),
        (30, 5, ConvolutionSpec(1, 2)),
    ],
}

ODD_WIDTHS = [(outputs, 3, ConvolutionSpec(1, 1, relu=True)) for outputs in (21, 42, 85, 170)]


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("runs", "batch"), [(3, 4), (8, 64)], ids=["small tiles", "large tiles"])
@pytest.mark.parametrize("specs", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_consecutive_convolutions_and_pools_equal_torchs(specs, runs, batch, dtype) -> None:
    """Rounding may change the sign before a ReLU or the maximum of a pool, which moves a gradient elsewhere."""
    errors = relative_errors(3, 32, specs, dtype, runs, batch)
    per_layer = 1e-3 if dtype == torch.float32 else 8e-3  # two factors, rounded to ten or to seven bits
    assert errors[0] < per_layer * len(specs)
    assert max(errors) < (0.1 if dtype == torch.float32 else 0.3)  # the root of the share of moved gradients


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("specs", [CONVOLUTIONS["pools between"], ODD_WIDTHS], ids=["pools between", "odd widths"])
def test_repeated_convolutions_give_the_same_bits_on_a_busy_gpu(specs, dtype) -> None:
    """Rarely and slightly wrong results would mean that a product reads registers that are being overwritten."""
    x, plan, weights, biases = random_convolutions(3, 32, specs, dtype, runs=8, batch=256)

    def once() -> list[torch.Tensor]:
        out = fused_convolutions(x, plan, weights, biases)
        return [out, *torch.autograd.grad(out, (*weights, *biases), torch.ones_like(out))]

    with tf32_mode("tf32"):
        first = once()
        differing = [sum(int((a != b).sum()) for a, b in zip(once(), first, strict=True)) for _ in range(30)]
    assert differing == [0] * 30


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_passes_through_convolutions_and_stays_in_its_run(dtype) -> None:
    specs = (ConvolutionSpec(1, 1, relu=True, pool=True), ConvolutionSpec(1, 1, relu=True))
    x = torch.randn(3 * 3, 64, 8, 8, device="cuda").to(dtype)
    weights = [torch.randn(3, 64, 64, 3, 3, device="cuda").requires_grad_() for _ in specs]
    biases = [torch.zeros(3, 64, device="cuda").requires_grad_() for _ in specs]
    with torch.no_grad():
        weights[0][1, 5] = float("nan")
    with tf32_mode("tf32"):
        out = fused_convolutions(x, specs, weights, biases)
        gradients = torch.autograd.grad(out.sum(), [*weights, *biases])
    assert out.isfinite().flatten(1).all(1).tolist() == [True] * 3 + [False] * 3 + [True] * 3
    for gradient in gradients:
        assert gradient.isfinite().flatten(1).all(1).tolist()[::2] == [True, True]
    assert not bool(gradients[1][1].isfinite().all())


@gpu
def test_output_of_a_convolution_may_be_changed_in_place() -> None:
    """As by `nn.ReLU(inplace=True)`, or by an addition to the result."""
    x = torch.randn(3 * 2, 64, 8, 8, device="cuda")
    weight = torch.randn(3, 64, 64, 3, 3, device="cuda").requires_grad_()
    with tf32_mode("tf32"):
        expected = torch.autograd.grad(
            torch.relu(fused_convolutions(x, (ConvolutionSpec(1, 1),), [weight], [None]) + 1).sum(), weight
        )
        in_place = torch.autograd.grad(
            fused_convolutions(x, (ConvolutionSpec(1, 1),), [weight], [None]).add_(1).relu_().sum(), weight
        )
    torch.testing.assert_close(in_place, expected)


METHODS = ["plain", "ewc", "explicit-ewc", "si", "rwalk", "explicit-mas", "proximal-ewc", "budget-ewc", "uniform"]
TOLERANCE = {"float32": 1e-4, "tf32": 2e-2, "bf16": 6e-2}


@gpu
@pytest.mark.parametrize(
    ("network", "method", "dtype"),
    [
        *(("laboratory.test_fleet:convolving", method, "tf32") for method in METHODS),
        *((network, "explicit-ewc", dtype) for network in ("mlp", "cnn6") for dtype in TOLERANCE),
    ],
)
def test_short_run_is_close_to_float64(network, method, dtype) -> None:
    """Compare the change of the weights with the change in float64."""
    stream = class_stream(tasks=2, images=40)
    changes = {}
    for kind in ("float64", dtype):
        fleet = Fleet(
            [spec_for(method, stream, s, network=network, dtype=kind, epochs=1, lr=0.01) for s in (0, 1)],
            stream,
            device="cuda",
        )
        initial = {name: p.detach().double().clone() for name, p in fleet.stack.parameters.items()}
        fleet.run()
        changes[kind] = torch.cat(
            [(p.detach().double() - initial[name]).flatten() for name, p in fleet.stack.parameters.items()]
        )
    exact = changes["float64"]
    assert float((changes[dtype] - exact).norm() / exact.norm()) < TOLERANCE[dtype]


@gpu
def test_diverged_run_on_a_gpu_is_marked_and_does_not_change_its_neighbours() -> None:
    stream = class_stream(tasks=3, images=40)
    settings = {"dtype": "tf32", "epochs": 4}
    good = [spec_for("ewc", stream, seed, **settings) for seed in (0, 1)]
    bad = spec_for("ewc", stream, 2, strength=1e30, **settings)
    together = {r.spec.key: r for r in Fleet([*good, bad], stream, device="cuda").run()}
    alone = {r.spec.key: r for r in Fleet(good, stream, device="cuda").run()}
    assert together[bad.key].status == "unstable"
    for spec in good:
        assert together[spec.key].status == "finished"
        assert together[spec.key].matrix[-1] == pytest.approx(alone[spec.key].matrix[-1], abs=3.0)
