"""Measurements of a stack equal the measurements of its single networks."""

import pytest
import torch

from laboratory.small import class_stream
from mooring.diagnose.drift import cka, parameter_drift
from mooring.diagnose.stability import divergence_limit, interpolation_weight, largest_safe_strength, verdicts
from mooring.rules import EWC, Penalty
from mooring_lab.fleet import measurements
from mooring_lab.fleet.measurements import cka_of, drift_of
from mooring_lab.fleet.method_state import MethodState
from mooring_lab.fleet.sgd import SGD
from mooring_lab.fleet.stack.stack import Stack
from mooring_lab.methods import find_method
from mooring_lab.networks.initialization import initial_network
from mooring_lab.networks.inputs import normalize_pixels

STREAM = class_stream()
SEEDS = [0, 1, 2, 3, 4]


@pytest.fixture(
    params=[
        "mlp",
        "laboratory.test_fleet:convolving",
        "laboratory.test_fleet:normalised",
        "laboratory.test_fleet:dropping",
    ]
)
def stack_and_first(request):
    """Return a stack, and its tensors before a small change of every weight."""
    stack = Stack([initial_network(request.param, STREAM, seed, dtype=torch.float64) for seed in SEEDS], seeds=SEEDS)
    first = {name: t.detach().clone() for name, t in (stack.parameters | stack.buffers).items()}
    random = torch.Generator().manual_seed(0)
    for p in stack.parameters.values():
        p.data += 0.05 * torch.randn(p.shape, generator=random, dtype=p.dtype)
    return stack, first


def test_drift_and_cka_equal_those_of_each_network_alone(stack_and_first, monkeypatch) -> None:
    stack, first = stack_and_first
    inputs = normalize_pixels(STREAM.test.images[:40], torch.float64)
    monkeypatch.setitem(
        measurements.INPUT_VALUES_PER_PASS, "cpu", 2 * inputs.numel()
    )  # two runs at a time, and one that is left
    drifts, ckas = drift_of(stack, first), cka_of(stack, first, inputs)
    for run in range(len(SEEDS)):
        then, now = stack.network_of(run, first), stack.network_of(run)
        names = [name for name in stack.parameters if name.startswith("backbone.")]
        parts = ((name, stack.parameters[name][run], first[name][run]) for name in names)
        assert drifts[run] == pytest.approx(parameter_drift(parts))
        alone = {layer: value for layer, value in cka(then, now, inputs).items() if layer.startswith("backbone.")}
        assert ckas[run] == pytest.approx(alone, abs=1e-9)
        assert 0 < min(ckas[run].values()) < 1


def test_cka_leaves_the_stack_unchanged(stack_and_first) -> None:
    stack, first = stack_and_first
    inputs = normalize_pixels(STREAM.test.images[:20], torch.float64)
    x = inputs.expand(len(stack), *inputs.shape)
    before = stack(x, 0), {name: id(t) for name, t in (stack.parameters | stack.buffers).items()}
    cka_of(stack, first, inputs)
    assert torch.equal(stack(x, 0), before[0])
    assert {name: id(t) for name, t in (stack.parameters | stack.buffers).items()} == before[1]


def test_cka_of_fewer_than_four_inputs_is_empty(stack_and_first) -> None:
    stack, first = stack_and_first
    assert cka_of(stack, first, normalize_pixels(STREAM.test.images[:3], torch.float64)) == [{}] * len(stack)


def test_stability_and_importance_equal_those_of_each_run() -> None:
    """Scores are per weight or per parameter; one run has a NaN."""
    lr, strength = torch.tensor([0.1, 0.2, 0.05]), torch.tensor([1.0, 30.0, 2.0])
    names = ["one.weight", "one.bias", "two.weight"]
    moorings = MethodState(find_method("ewc"), [0, 1, 2], lr, strength, names)
    assert isinstance(moorings.pull, Penalty)
    assert isinstance(moorings.importance, EWC)
    shapes = dict(zip(names, [(4, 3), (4,), (2, 4)], strict=True))
    parameters = {name: torch.zeros(3, *shape) for name, shape in shapes.items()}
    moorings.consolidate(parameters)
    random = torch.Generator().manual_seed(0)
    for name, held in moorings.states.items():
        shape = (3, 1, 1) if name == "two.weight" else (3, *shapes[name])
        held.previous = 3 * torch.randn(shape, generator=random)
    moorings.states["one.bias"].previous[2, 1] = torch.nan
    momenta = [0.0, 0.9, 0.5]
    optimizer = SGD(lr, momentum=torch.tensor(momenta))
    verdicts_of_runs, importances = moorings.stability(optimizer, slice(None)), moorings.importance_by_layer()
    for run, momentum in enumerate(momenta):
        previous = {name: held.previous[run].expand(shapes[name]).flatten() for name, held in moorings.states.items()}
        scores = torch.cat(list(previous.values()))
        p = interpolation_weight(float(lr[run]), float(strength[run]), scores)
        sgd = torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=momentum)
        counts = verdicts(p, divergence_limit(sgd, sgd.param_groups[0]))
        verdict = verdicts_of_runs[run]
        actual = (verdict.free, verdict.interpolate, verdict.extrapolate, verdict.diverge, verdict.negative)
        assert actual == (counts.free, counts.interpolate, counts.extrapolate, counts.diverge, counts.negative)
        assert verdict.largest == pytest.approx(float(p.max()), nan_ok=True)
        assert verdict.safe_strength == pytest.approx(largest_safe_strength(float(lr[run]), scores))
        one = torch.cat([previous["one.weight"], previous["one.bias"]]).double().mean()
        expected = {"one": float(one), "two": float(previous["two.weight"].double().mean())}
        assert importances[run] == pytest.approx(expected, nan_ok=True)
