"""Tests of what a reference costs: passes over its batches, copies of parameters, and memory."""

import math

import pytest
import torch
from torch import nn

import mooring
from live_memory import peak_bytes
from mooring.backends.budget_solver import BudgetSolver
from mooring.backends.budget_terms import pull_energy
from mooring.errors import MooringError
from mooring.gauge.reference_gauges import ROUNDS
from mooring.importance import Kronecker, sampled_places
from mooring.reference import calibration, memory_estimate
from mooring.reference.calibration import MAX_FACTOR, MIN_FACTOR, FactorSearch
from mooring.state.offload import AnchorOffload


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


class TwoHeads(nn.Module):
    """Linear layers with the same input."""

    def __init__(self, inputs, *outputs):
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(inputs, count) for count in outputs)

    def forward(self, x):
        return torch.cat([head(x) for head in self.heads], -1)


def reference(count, labels=True):
    torch.manual_seed(1)
    return [(torch.randn(8, 6), torch.randint(3, (8,))) if labels else torch.randn(8, 6) for _ in range(count)]


def counted(model):
    """Count forward passes with and without gradients."""
    passes = {True: 0, False: 0}

    def count(*_):
        passes[torch.is_grad_enabled()] += 1

    model.register_forward_hook(count)
    return passes


@pytest.mark.parametrize("labels", [True, False])
@pytest.mark.parametrize("importance", [mooring.EWC(decay=None, per_sample=True), Kronecker()])
def test_reference_is_read_in_one_pass_and_calibrated_in_few(importance, labels):
    model = net()
    passes = counted(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mooring.attach(
        model,
        optimizer,
        importance=importance,
        pull=mooring.Budget(0.1, measured=False),
        reference=reference(32, labels),
    )
    assert passes[True] == 32 + 8  # each batch once, and the 8 of the calibration once more
    assert passes[False] <= 2 * (7 + 2 * 8)  # a search with one batch, and all batches twice, each with two signs


@pytest.mark.parametrize(("places", "of_biases"), [((), []), ((5,), [8, 3, 4])])
@pytest.mark.parametrize("measured", [True, False])
def test_each_factor_of_a_reference_is_decomposed_once(measured, places, of_biases, monkeypatch):
    """Layers with the same input have one A; a bias has the G of its weight if samples have a single place."""
    sizes, solve = [], torch.linalg.eigh

    def counted_solver(matrix):
        sizes.append(matrix.shape[-1])
        return solve(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", counted_solver)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), TwoHeads(8, 3, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pull = mooring.Budget(0.1, measured=measured, **({"distil": False} if measured else {}))
    data = [torch.randn(8, *places, 6) for _ in range(4)]
    mooring.attach(model, optimizer, importance=Kronecker(), pull=pull, reference=data)
    assert sorted(sizes) == sorted([6, 8, 8, 3, 4, *of_biases])


@pytest.mark.parametrize(("distil", "distilled"), [(True, 21 * (1 + ROUNDS)), ("unmixed", 2 * 21), (False, 0)])
def test_reference_of_a_measured_budget_is_read_and_recorded_once(distil, distilled):
    """Mixtures are recorded beside the batches; without them, halves of batches are distilled."""
    model = net()
    passes, data = counted(model), reference(32, labels=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mooring.attach(model, optimizer, pull=mooring.Budget(0.1, distil=distil), reference=data)
    assert passes[True] == 21  # without a calibration
    assert passes[False] == 11 + 2 + distilled  # the gauge, of which two batches show that outputs are the same


def solved(rise):
    return FactorSearch(0.1).solve(rise, tolerance=0.03)


@pytest.mark.parametrize("true", [0.013, 0.5, 3.0, 77.0, 4e5])
@pytest.mark.parametrize("power", [0.7, 1.0, 1.6])
def test_factor_of_a_power_law_is_found_in_few_measurements(true, power):
    calls = []

    def rise(q):
        calls.append(q)
        return 0.1 * (q * true / 0.1) ** power

    assert solved(rise) == pytest.approx(true, rel=0.01)
    assert len(calls) <= 5


def test_factor_of_a_loss_that_saturates_or_overflows_is_found():
    assert solved(lambda q: min(50 * q, 2.0)) == pytest.approx(50, rel=0.01)
    assert solved(lambda q: 50 * q if q < 0.01 else float("inf")) == pytest.approx(50, rel=0.01)
    assert solved(lambda q: max(0.0, 50 * q - 0.01)) == pytest.approx(500 / 11, rel=0.01)


def test_factor_stops_at_its_bounds():
    assert solved(lambda q: 0.0) == MIN_FACTOR
    assert solved(lambda q: 1.0) == MAX_FACTOR


def by_bisection(states, budget, batches, loss, directions):
    """Return the factor by the definition: bisection of the mean rise over batches, each along v and -v of one of them.

    Directions are rounded to bfloat16 by neither this nor, as far as the result shows, the calibration.
    """
    held = calibration._states_of_this_task(states)
    parameters = [state.parameter for state in held]
    anchors = [p.detach().clone() for p in parameters]
    generator, probes = torch.Generator().manual_seed(states.tasks), []
    for _ in range(directions):
        signs = torch.randint(2, (len(batches),), generator=generator) * 2 - 1
        total = sum(sign * loss(states.model, batch) for sign, batch in zip(signs, batches, strict=True))
        gradient = torch.autograd.grad(total, parameters)
        norm = sum(g.square().sum() for g in gradient).sqrt()
        probes += [[g / norm for g in gradient], [-g / norm for g in gradient]]

    @torch.no_grad()
    def rise(q):
        rises = []
        for index, probe in enumerate(probes):
            measured = batches[index // 2 :: directions]
            for p, anchor, v in zip(parameters, anchors, probe, strict=True):
                p.copy_(anchor + v)
            if (spent := pull_energy(held)) < q:
                for p, anchor, v in zip(parameters, anchors, probe, strict=True):
                    p.copy_(anchor + v * (q / spent) ** 0.5)
            solver = BudgetSolver(mooring.Budget(q), AnchorOffload(1))
            solver.apply_pull(held, parameters, 1)
            displaced = [float(loss(states.model, batch)) for batch in measured]
            for p, anchor in zip(parameters, anchors, strict=True):
                p.copy_(anchor)
            rises += [at - float(loss(states.model, batch)) for at, batch in zip(displaced, measured, strict=True)]
        return sum(rises) / len(rises)

    low, high = math.log(MIN_FACTOR), math.log(MAX_FACTOR)
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if rise(budget.nats / math.exp(middle)) > budget.nats else (low, middle)
    return math.exp((low + high) / 2)


def cross_entropy(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize(("stored_bytes", "directions"), [(1 << 20, 4), (1000, 4), (0, 2)])
@pytest.mark.parametrize("nats", [0.01, 0.3])
@pytest.mark.parametrize("importance", [mooring.EWC(decay=None, per_sample=True), Kronecker()])
def test_calibration_solves_the_mean_rise_over_all_batches(importance, nats, stored_bytes, directions, monkeypatch):
    monkeypatch.setattr(calibration, "STORED_BYTES", stored_bytes)  # 83 weights take 1,328 in float32
    monkeypatch.setattr(calibration, "EXACT_BYTES", stored_bytes)
    model, data, budget = net(), reference(8), mooring.Budget(nats, measured=False)
    moor = mooring.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), importance=importance, pull=budget)
    moor.estimate(data)
    expected = by_bisection(moor._states, budget, data, cross_entropy, directions)
    moor.consolidate(data=data)
    assert moor.calibration == [pytest.approx(expected, rel=0.05)]


def test_calibration_copies_no_parameter_that_stayed_and_leaves_all_in_place():
    model = net()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    moor = mooring.attach(model, optimizer, pull=mooring.Budget(0.1))
    moor.estimate(reference(4))
    held = calibration._states_of_this_task(moor._states)
    assert [state.name for state in held] == ["2.weight", "2.bias"]
    assert all(state.anchor is moor._states.records[state.parameter].anchor for state in held)


def test_reference_that_does_not_fit_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(memory_estimate, "free_bytes", lambda device: 500)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def unread():
        raise AssertionError("read")
        yield

    with pytest.raises(MooringError, match=r"needs 0.0 GB on cpu besides activations, and 0.0 GB are free") as error:
        mooring.attach(model, optimizer, reference=unread())
    assert "\n" not in str(error.value)


def test_memory_estimate_counts_what_is_allocated():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    moor = mooring.attach(model, optimizer, importance=Kronecker(), pull=mooring.Budget(0.1))
    estimated = memory_estimate.estimated_bytes(moor._states)[torch.device("cpu")]
    moor.consolidate(data=reference(4))
    kept = sum(p.numel() * 4 for p in model.parameters())  # gradients
    for state in moor._states.records.values():
        tensors = [state.anchor, *state.factors.slots().values(), *state.factors.basis]
        kept += sum(t.numel() * t.element_size() for t in tensors)
    assert estimated == kept


class LanguageModel(nn.Module):
    """A small stack of linear layers between an embedding and a head."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(5000, 32), nn.Linear(32, 5000, bias=False)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def depthwise_network():
    layers = []
    for _ in range(3):
        layers += [nn.Conv2d(8, 32, 1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1, groups=32)]
        layers += [nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 8, 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))


INPUTS = {
    LanguageModel: lambda: torch.randint(5000, (8, 64)),
    depthwise_network: lambda: torch.randn(16, 8, 24, 24),
}


@pytest.mark.filterwarnings("ignore:the budget could not be calibrated")  # the weights are random
@pytest.mark.parametrize("options", [{}, {"measured": False}], ids=["measured", "calibrated"])
@pytest.mark.parametrize("importance", [mooring.EWC(decay=None, per_sample=True), Kronecker()], ids=repr)
@pytest.mark.parametrize("make", INPUTS)
def test_attach_takes_little_more_memory_than_training(make, importance, options, monkeypatch):
    """Large models keep directions in bfloat16, and take windows of images in parts; so do these miniatures."""
    monkeypatch.setattr(calibration, "EXACT_BYTES", 0)
    monkeypatch.setattr(sampled_places, "MAX_WINDOWS", 1 << 17)
    torch.manual_seed(0)
    model, batches = make(), [INPUTS[make]() for _ in range(4)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    state, labels = [*model.parameters(), *model.buffers()], batches[0].numel() if make is LanguageModel else 16

    def attach():
        pull = mooring.Budget(0.1, **options)
        mooring.attach(model, optimizer, importance=importance, pull=pull, reference=batches).detach()

    def train():
        for batch in batches[:2]:
            optimizer.zero_grad()
            cross_entropy(lambda x: model(x).flatten(0, -2), (batch, torch.zeros(labels, dtype=torch.int64))).backward()
            optimizer.step()

    of_attach = peak_bytes(attach, state)
    assert of_attach < 1.1 * peak_bytes(train, state)
