"""Tests of what a reference costs: passes over its batches, copies of parameters, and memory."""

import pytest
import torch
from torch import nn

import mooring
from mooring.errors import MooringError
from mooring.importance import Kronecker
from mooring.reference import memory_estimate
from mooring.reference.calibration import MAX_FACTOR, MIN_FACTOR, solve_factor


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


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
    mooring.attach(model, optimizer, importance=importance, pull=mooring.Budget(0.1), reference=reference(32, labels))
    assert passes[True] == 32 + 8  # each batch once, and the 8 of the calibration once more
    steps = (3 * passes[True] + passes[False]) / 3  # a backward pass takes about two forward passes
    assert steps <= 70


@pytest.mark.parametrize("true", [0.013, 0.5, 3.0, 77.0, 4e5])
@pytest.mark.parametrize("power", [0.7, 1.0, 1.6])
def test_factor_of_a_power_law_is_found_in_few_measurements(true, power):
    calls = []

    def rise(q):
        calls.append(q)
        return 0.1 * (q * true / 0.1) ** power

    assert solve_factor(rise, 0.1) == pytest.approx(true, rel=0.01)
    assert len(calls) <= 5


def test_factor_of_a_loss_that_saturates_or_overflows_is_found():
    assert solve_factor(lambda q: min(50 * q, 2.0), 0.1) == pytest.approx(50, rel=0.01)
    assert solve_factor(lambda q: 50 * q if q < 0.01 else float("inf"), 0.1) == pytest.approx(50, rel=0.01)
    assert solve_factor(lambda q: max(0.0, 50 * q - 0.01), 0.1) == pytest.approx(500 / 11, rel=0.01)


def test_factor_stops_at_its_bounds():
    assert solve_factor(lambda q: 0.0, 0.1) == MIN_FACTOR
    assert solve_factor(lambda q: 1.0, 0.1) == MAX_FACTOR


def test_calibration_copies_no_parameter_that_stayed_and_leaves_all_in_place():
    from mooring.reference.calibration import _states_of_this_task

    model = net()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    moor = mooring.attach(model, optimizer, pull=mooring.Budget(0.1))
    moor.estimate(reference(4))
    held = _states_of_this_task(moor._states)
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
