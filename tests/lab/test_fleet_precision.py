"""Reduced precision on a GPU stays close to float64, as far as its mantissa says; kernels equal torch's own."""

import pytest
import torch
from torch.nn.functional import conv2d

from lab.small import class_stream, spec_for
from mooring.errors import MooringError
from mooring.lab.fleet.fleet import Fleet
from mooring.lab.fleet.precision import computing

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


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
]


@gpu
@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_stacked_convolutions_and_their_gradients_equal_torchs(case, dtype, relu) -> None:
    from mooring.lab.fleet.convolution import Convolution

    channels, outputs, size, kernel, stride, padding = case
    runs, batch = 3, 4
    x = torch.randn(runs * batch, channels, size, size, device="cuda", dtype=dtype, requires_grad=True)
    weight = (0.1 * torch.randn(runs, outputs, channels, kernel, kernel, device="cuda")).requires_grad_()
    bias = torch.randn(runs, outputs, device="cuda", requires_grad=True)
    with computing("tf32"):
        out = Convolution.apply(x, weight, bias, stride, padding, relu)
        told = torch.randn_like(out) / 100
        mine = [out, *torch.autograd.grad(out, (x, weight, bias), told)]
    exact = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    parts = zip(exact[0].chunk(runs), exact[1].unbind(), exact[2].unbind(), strict=True)
    ref = torch.cat([conv2d(p, w, b, stride=stride, padding=padding) for p, w, b in parts])
    ref = torch.where(out > 0, ref, 0) if relu else ref  # a value that rounds to the other side of 0 is not the point
    theirs = [ref, *torch.autograd.grad(ref, exact, told.double())]
    tolerance = 2e-3 if dtype == torch.float32 else 2e-2  # of the norm: mantissas of ten and of seven bits
    for one, other in zip(mine, theirs, strict=True):
        assert float((one.double() - other).detach().norm() / other.detach().norm()) < tolerance


METHODS = ["plain", "ewc", "explicit-ewc", "si", "rwalk", "explicit-mas", "proximal-ewc", "uniform"]
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
        fleet.sail()
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
    together = {r.spec.key: r for r in Fleet([*good, bad], stream, device="cuda").sail()}
    alone = {r.spec.key: r for r in Fleet(good, stream, device="cuda").sail()}
    assert together[bad.key].status == "unstable"
    for spec in good:
        assert together[spec.key].status == "finished"
        assert together[spec.key].matrix[-1] == pytest.approx(alone[spec.key].matrix[-1], abs=3.0)
