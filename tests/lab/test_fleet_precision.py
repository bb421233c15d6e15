"""Reduced precision on a GPU stays close to float64, as far as its mantissa says; kernels equal torch's own."""

import pytest
import torch
from torch.nn.functional import conv2d, max_pool2d

from lab.small import class_stream, gpu, spec_for
from mooring.errors import MooringError
from mooring.lab.fleet.fleet import Fleet
from mooring.lab.fleet.gpu.fused_convolutions import ConvolutionSpec, fused_convolutions
from mooring.lab.model.precision import tf32_mode


def test_what_only_a_gpu_computes_with_is_refused_on_a_cpu() -> None:
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
    """What torch's own layers give, run by run, in float64."""
    outs = []
    for run, images in enumerate(x.chunk(runs)):
        for spec, weight, bias in zip(specs, weights, biases, strict=True):
            images = conv2d(images, weight[run], bias[run], stride=spec.stride, padding=spec.padding)
            images = images.relu() if spec.relu else images
            images = max_pool2d(images, 2) if spec.pool else images
        outs.append(images)
    return torch.cat(outs)


def made(
    channels: int, size: int, specs: list[tuple[int, int, ConvolutionSpec]], dtype: torch.dtype, runs: int, batch: int
) -> tuple[torch.Tensor, tuple[ConvolutionSpec, ...], list[torch.Tensor], list[torch.Tensor]]:
    """Images, specs, weights and biases of a chain."""
    torch.manual_seed(0)
    x = torch.randn(runs * batch, channels, size, size, device="cuda").to(dtype).requires_grad_()
    weights, biases = [], []
    for outputs, kernel, _ in specs:
        scale = 1.5 / (channels * kernel * kernel) ** 0.5
        weights.append((scale * torch.randn(runs, outputs, channels, kernel, kernel, device="cuda")).requires_grad_())
        biases.append(torch.randn(runs, outputs, device="cuda").requires_grad_())
        channels = outputs
    return x, tuple(spec for *_, spec in specs), weights, biases


def compared(
    channels: int,
    size: int,
    specs: list[tuple[int, int, ConvolutionSpec]],
    dtype: torch.dtype,
    runs: int = 3,
    batch: int = 4,
) -> list[float]:
    """How far a chain and its gradients are from torch's, each relative to its norm."""
    x, plan, weights, biases = made(channels, size, specs, dtype, runs, batch)
    with tf32_mode("tf32"):
        out = fused_convolutions(x, plan, weights, biases)
        told = torch.randn_like(out) / 100
        mine = [out, *torch.autograd.grad(out, (x, *weights, *biases), told)]
    exact = [t.detach().double().requires_grad_() for t in (x, *weights, *biases)]
    ref = by_torch(exact[0], exact[1 : 1 + len(specs)], exact[1 + len(specs) :], plan, runs)
    theirs = [ref, *torch.autograd.grad(ref, exact, told.double())]
    return [float((a.double() - b).detach().norm() / b.detach().norm()) for a, b in zip(mine, theirs, strict=True)]


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_stacked_convolutions_and_their_gradients_equal_torchs(case, dtype) -> None:
    channels, outputs, size, kernel, stride, padding = case
    apart = compared(channels, size, [(outputs, kernel, ConvolutionSpec(stride, padding))], dtype)
    assert max(apart) < (2e-3 if dtype == torch.float32 else 2e-2)  # mantissas of ten and of seven bits


CHAINS = {
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

WIDE = [(outputs, 3, ConvolutionSpec(1, 1, relu=True)) for outputs in (21, 42, 85, 170)]


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("runs", "batch"), [(3, 4), (8, 64)], ids=["small tiles", "large tiles"])
@pytest.mark.parametrize("specs", CHAINS.values(), ids=CHAINS)
def test_a_chain_of_convolutions_and_pools_equals_torchs(specs, runs, batch, dtype) -> None:
    """A value that rounds to the other side of 0, or past its neighbour in a pool, sends its gradient elsewhere."""
    apart = compared(3, 32, specs, dtype, runs, batch)
    each = 1e-3 if dtype == torch.float32 else 8e-3  # two factors, cut off after ten and after seven bits
    assert apart[0] < each * len(specs)
    assert max(apart) < (0.1 if dtype == torch.float32 else 0.3)  # the root of the share that went elsewhere


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("specs", [CHAINS["pools between"], WIDE], ids=["pools between", "odd widths"])
def test_the_same_chain_gives_the_same_bits_however_often_and_however_busy(specs, dtype) -> None:
    """A product that still reads registers into which the next images are loaded is wrong now and then, a little."""
    x, plan, weights, biases = made(3, 32, specs, dtype, runs=8, batch=256)

    def once() -> list[torch.Tensor]:
        out = fused_convolutions(x, plan, weights, biases)
        return [out, *torch.autograd.grad(out, (*weights, *biases), torch.ones_like(out))]

    with tf32_mode("tf32"):
        first = once()
        apart = [sum(int((a != b).sum()) for a, b in zip(once(), first, strict=True)) for _ in range(30)]
    assert apart == [0] * 30


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_a_number_goes_through_a_chain_and_stays_in_its_run(dtype) -> None:
    specs = (ConvolutionSpec(1, 1, relu=True, pool=True), ConvolutionSpec(1, 1, relu=True))
    x = torch.randn(3 * 3, 64, 8, 8, device="cuda").to(dtype)
    weights = [torch.randn(3, 64, 64, 3, 3, device="cuda").requires_grad_() for _ in specs]
    biases = [torch.zeros(3, 64, device="cuda").requires_grad_() for _ in specs]
    with torch.no_grad():
        weights[0][1, 5] = float("nan")
    with tf32_mode("tf32"):
        out = fused_convolutions(x, specs, weights, biases)
        found = torch.autograd.grad(out.sum(), [*weights, *biases])
    assert out.isfinite().flatten(1).all(1).tolist() == [True] * 3 + [False] * 3 + [True] * 3
    for gradient in found:
        assert gradient.isfinite().flatten(1).all(1).tolist()[::2] == [True, True]
    assert not bool(found[1][1].isfinite().all())


@gpu
def test_what_a_convolution_gives_may_be_changed_in_place() -> None:
    """As in a network with `nn.ReLU(inplace=True)` of its own, or a sum into the result."""
    x = torch.randn(3 * 2, 64, 8, 8, device="cuda")
    weight = torch.randn(3, 64, 64, 3, 3, device="cuda").requires_grad_()
    with tf32_mode("tf32"):
        apart = torch.autograd.grad(
            torch.relu(fused_convolutions(x, (ConvolutionSpec(1, 1),), [weight], [None]) + 1).sum(), weight
        )
        inside = torch.autograd.grad(
            fused_convolutions(x, (ConvolutionSpec(1, 1),), [weight], [None]).add_(1).relu_().sum(), weight
        )
    torch.testing.assert_close(inside, apart)


METHODS = ["plain", "ewc", "explicit-ewc", "si", "rwalk", "explicit-mas", "proximal-ewc", "budget-ewc", "uniform"]
CLOSE = {"float32": 1e-4, "tf32": 2e-2, "bf16": 6e-2}


@gpu
@pytest.mark.parametrize(
    ("network", "method", "dtype"),
    [
        *(("lab.test_fleet:convolving", method, "tf32") for method in METHODS),
        *((network, "explicit-ewc", dtype) for network in ("mlp", "cnn6") for dtype in CLOSE),
    ],
)
def test_a_short_run_stays_close_to_float64(network, method, dtype) -> None:
    """How far the weights moved, relative to the way they went in float64."""
    stream = class_stream(tasks=2, images=40)
    went = {}
    for kind in ("float64", dtype):
        fleet = Fleet(
            [spec_for(method, stream, s, network=network, dtype=kind, epochs=1, lr=0.01) for s in (0, 1)],
            stream,
            device="cuda",
        )
        began = {name: p.detach().double().clone() for name, p in fleet.stack.parameters.items()}
        fleet.run()
        went[kind] = torch.cat(
            [(p.detach().double() - began[name]).flatten() for name, p in fleet.stack.parameters.items()]
        )
    exact = went["float64"]
    assert float((went[dtype] - exact).norm() / exact.norm()) < CLOSE[dtype]


@gpu
def test_a_diverged_run_on_a_gpu_is_marked_and_its_neighbours_are_untouched() -> None:
    stream = class_stream(tasks=3, images=40)
    told = {"dtype": "tf32", "epochs": 4}
    good = [spec_for("ewc", stream, seed, **told) for seed in (0, 1)]
    bad = spec_for("ewc", stream, 2, strength=1e30, **told)
    together = {r.spec.key: r for r in Fleet([*good, bad], stream, device="cuda").run()}
    alone = {r.spec.key: r for r in Fleet(good, stream, device="cuda").run()}
    assert together[bad.key].status == "unstable"
    for spec in good:
        assert together[spec.key].status == "finished"
        assert together[spec.key].matrix[-1] == pytest.approx(alone[spec.key].matrix[-1], abs=3.0)
