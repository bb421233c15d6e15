"""Tests that a budget over batches of parameters equals a plain one, parameter by parameter."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import mooring
from mooring.backends.budget_solver import BudgetSolver
from mooring.backends.budget_terms import budget_term, pull_energy
from mooring.backends.eager import removal_rule
from mooring.backends.kernels.codegen import trace_rule
from mooring.backends.kronecker_batch import KroneckerBatch, kronecker_batches
from mooring.rules import Kronecker
from mooring.rules.budget import budget_solved
from mooring.state.memory import Memory

TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-9}


class Net(nn.Module):
    """Layers of equal and of different shapes, with and without factors."""

    def __init__(self):
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3, bias=False)
        )
        self.layers = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16, bias=False)])
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        x = self.convolutions(x).flatten(1)
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x)


def moored(dtype, **options):
    torch.manual_seed(0)
    model = Net().to(dtype).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = [(torch.randn(8, 2, 6, 6, dtype=dtype), torch.randint(5, (8,))) for _ in range(3)]
    rules = {"importance": Kronecker(), "pull": mooring.Budget(1e-3, distil=False), **options}
    return model, optimizer, mooring.attach(model, optimizer, reference=data, **rules), data


def displaced_states(moor, scale=0.3):
    """Return copies of the states, displaced from their anchors, which share nothing with the model."""
    torch.manual_seed(1)
    states = []
    for state in moor._states.records.values():
        parameter = state.anchor + scale * torch.randn_like(state.anchor)
        states.append(replace(state, parameter=parameter, factors=copy.deepcopy(state.factors)))
    return states


def pull_one_by_one(states, budget):
    """Pull with the written formula, parameter by parameter; return mu."""
    terms = [term for state in states if (term := budget_term(state)) is not None]
    start = torch.zeros((), dtype=torch.float64)
    mu = budget_solved(lambda mu, done: sum(term.spent(mu) for term in terms), budget.allowed(1), start)
    for term in terms:
        term.apply_pull(budget, mu)
    return float(mu)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_batches_of_layers_pull_as_single_parameters_do(dtype):
    _, _, moor, _ = moored(dtype)
    batched, alone = displaced_states(moor), displaced_states(moor)
    tolerance, budget = TOLERANCES[dtype], mooring.Budget(1e-3)
    assert pull_energy(batched) > 1e-3
    solver = BudgetSolver(budget)
    with torch.no_grad():
        solver.apply_pull(batched, [state.parameter for state in batched], 1)
        mu = pull_one_by_one(alone, budget)
    assert float(solver.mu) == pytest.approx(mu, rel=tolerance)
    assert pull_energy(batched) == pytest.approx(pull_energy(alone), rel=tolerance)
    for one, other in zip(batched, alone, strict=True):
        torch.testing.assert_close(one.parameter, other.parameter, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_energy_of_a_batch_is_that_of_the_whole_curvature(dtype):
    _, _, moor, _ = moored(dtype)
    states = [state for state in displaced_states(moor) if state.factors]
    expected = 0.0
    for state in states:
        factors = state.factors
        d = (state.parameter - state.anchor).reshape(len(factors.past_outputs), -1).double()
        expected += float((factors.past_outputs.double() @ d @ factors.past_inputs.double() * d).sum()) / 2
    spent = KroneckerBatch(states).spent(0.0)[0]
    assert float(spent) == pytest.approx(expected, rel=TOLERANCES[dtype])


def test_budget_that_is_not_spent_leaves_every_bit():
    _, _, moor, _ = moored(torch.float32)
    states = displaced_states(moor, scale=1e-9)
    before = [state.parameter.clone() for state in states]
    BudgetSolver(mooring.Budget(1e9)).apply_pull(states, [s.parameter for s in states], 1)
    assert all(torch.equal(state.parameter, value) for state, value in zip(states, before, strict=True))


def test_batches_share_the_eigenbases_of_their_layers():
    _, _, moor, _ = moored(torch.float32)
    states = [state for state in displaced_states(moor) if state.factors]
    batch = KroneckerBatch(states)
    assert len(batch.groups) < len(states)
    storages = {batch.curvature.untyped_storage().data_ptr()}
    assert {state.factors.basis[2].untyped_storage().data_ptr() for state in states} == storages


def test_batches_follow_a_second_task():
    model, optimizer, moor, data = moored(torch.float64, memory=mooring.Memory())
    for step in range(6):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(data[0][0]), data[0][1]).backward()
        optimizer.step()
        assert moor.pull_energy() <= 1e-3 * max(1, moor.tasks) * (1 + 1e-9)
        if step == 2:
            moor.consolidate()


def test_parameters_without_gradients_spend_and_stay():
    model, optimizer, moor, data = moored(torch.float64)
    for p in model.layers.parameters():
        p.requires_grad_(False)
    frozen = [p.detach().clone() for p in model.layers.parameters()]
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(data[0][0]), data[0][1]).backward()
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.layers.parameters(), frozen, strict=True))
    assert 0 < moor.pull_energy() <= 1e-3


def test_frozen_and_excluded_layers_are_not_observed(monkeypatch):
    from mooring.observe import layer_observer

    model, optimizer, _, data = moored(torch.float32, exclude="head", memory=Memory())
    observed = []
    original = layer_observer.observe
    monkeypatch.setattr(
        layer_observer, "observe", lambda layer, *args: observed.append(layer) or original(layer, *args)
    )
    model.layers[1].requires_grad_(False)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(data[0][0]), data[0][1]).backward()
    optimizer.step()
    assert model.layers[0] in observed
    assert model.layers[1] not in observed
    assert model.head not in observed


def test_operations_of_a_step_do_not_grow_with_the_number_of_equal_layers():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.calls += "view" not in func.__name__
            return func(*args, **(kwargs or {}))

    def operations(depth):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(depth)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = [(torch.randn(8, 6), torch.randint(6, (8,))) for _ in range(2)]
        rules = {"importance": Kronecker(), "pull": mooring.Budget(1e-6, distil=False)}
        moor = mooring.attach(model, optimizer, reference=data, **rules)
        states = list(moor._states.records.values())
        moved = [state.parameter for state in states]
        solver = BudgetSolver(mooring.Budget(1e9))
        solver.apply_pull(states, moved, 1)
        with Count() as counter:
            solver.apply_pull(states, moved, 1)
        return counter.calls

    assert operations(6) == operations(3)


def test_rule_of_a_batch_can_become_a_kernel():
    tensors = {name: torch.ones(3) for name in ("theta", "previous", "removed")}
    scalars = {"anchor": torch.zeros(()), "mu": torch.ones(())}
    traced = trace_rule(removal_rule(mooring.Budget(1.0)), tensors | scalars)
    assert [name for name, _ in traced.stores] == ["removed"]


@pytest.mark.parametrize("blocks", [None, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_layers_are_pulled_in_bfloat16_as_in_float64(dtype, blocks):
    """The displacement that is left is within a hundredth of the exact one, and so is what it spends."""
    torch.manual_seed(0)
    layers, inputs = nn.Sequential(nn.Linear(32, 48, bias=False), nn.Tanh(), nn.Linear(48, 16, bias=False)), 32
    layers = layers.to(dtype)
    data = [(torch.randn(24, inputs, dtype=dtype), torch.randint(16, (24,))) for _ in range(4)]
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.05)
    rules = {"importance": Kronecker(blocks=blocks), "pull": mooring.Budget(1e-2, measured=False)}
    moor = mooring.attach(layers, optimizer, reference=data, loss=half_loss, **rules)
    states = [replace(state, factors=copy.deepcopy(state.factors)) for state in moor._states.records.values()]
    for state in states:
        state.parameter = state.anchor + 0.3 * torch.randn_like(state.anchor)
    (batch,) = kronecker_batches(states)
    assert {batch.d.dtype, batch.curvature.dtype, *(group.inputs.dtype for group in batch.groups)} == {torch.bfloat16}
    mu = 3.0 / float(batch.curvature.float().mean())
    spent, expected_spent, pulled = float(batch.spent(0.0)[0]), 0.0, []
    for state in states:
        d = state.parameter.double() - state.anchor.double()
        curvature = torch.kron(
            *(dense(side).double() for side in (state.factors.past_outputs, state.factors.past_inputs))
        )
        curvature *= state.factors.tasks
        expected_spent += float(d.flatten() @ curvature @ d.flatten()) / 2
        identity = torch.eye(len(curvature), dtype=torch.float64)
        pulled.append(torch.linalg.solve(identity + mu * curvature, d.flatten()).view_as(d))
    assert spent == pytest.approx(expected_spent, rel=1e-2)
    batch.apply_pull(mooring.Budget(1e-2), torch.tensor(mu, dtype=torch.float64))
    for state, expected in zip(states, pulled, strict=True):
        left = state.parameter.double() - state.anchor.double()
        rounding = 2.0**-8 * float(state.anchor.double().norm() + state.parameter.double().norm())
        assert float((left - expected).norm()) <= 0.01 * float(expected.norm()) + rounding


def half_loss(model, batch):
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs).float(), labels)


def dense(factor):
    """Return a factor as a whole matrix."""
    return torch.block_diag(*factor) if factor.ndim > 2 else factor


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_saved_state_of_half_precision_continues_with_the_same_bits(dtype, tmp_path):
    """Also after the model was converted to float32, from which on nothing is rounded to bfloat16."""

    def build(reference):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
        model = model.to(torch.bfloat16 if reference else dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rules = {"importance": Kronecker(), "pull": mooring.Budget(1e-3, measured=False)}
        rules |= {"reference": reference, "loss": half_loss} if reference else {}
        return model, optimizer, mooring.attach(model, optimizer, **rules)

    torch.manual_seed(1)
    data = [(torch.randn(8, 16).bfloat16(), torch.randint(4, (8,))) for _ in range(6)]

    def train(model, optimizer, batches):
        for batch in batches:
            optimizer.zero_grad()
            half_loss(model, (batch[0].to(model[0].weight.dtype), batch[1])).backward()
            optimizer.step()

    model, optimizer, moor = build(data[:3])
    train(model, optimizer, data[:2])
    model.to(dtype)
    train(model, optimizer, data[2:3])
    other, other_optimizer, loaded = build(None)
    torch.save([model.state_dict(), moor.state_dict()], tmp_path / "state.pt")
    weights, state = torch.load(tmp_path / "state.pt")
    other.load_state_dict(weights)
    loaded.load_state_dict(state)
    assert loaded.pull_energy() == moor.pull_energy() > 0
    for own, own_optimizer in ((model, optimizer), (other, other_optimizer)):
        train(own, own_optimizer, data[3:])
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
