"""Tests that a saved state decides the importance, pull, merge and buffers that the resuming script does not name."""

import warnings
from copy import deepcopy

import pytest
import torch
from torch import nn

import mooring
from mooring.errors import MooringError
from mooring.integrations.deferred_attach import MooringOwner
from mooring.rules import Balanced, Importance, Kronecker
from mooring.state.memory import Memory

pytestmark = pytest.mark.filterwarnings("ignore::mooring.errors.UnheldWarning")  # biases before batch norm


def network() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, count: int) -> None:
    for index in range(first, first + count):
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(8, 5, generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), x.argmax(1) % 3).backward()
        optimizer.step()


def reference() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(99)
    return [torch.randn(16, 5, generator=generator) for _ in range(4)]


def start(**options) -> tuple[nn.Module, torch.optim.Optimizer, mooring.Mooring]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, mooring.attach(model, optimizer, **options)


def trained(**options) -> tuple[nn.Module, torch.optim.Optimizer, mooring.Mooring]:
    """Train two tasks, the second one half."""
    model, optimizer, moor = start(**options)
    train(model, optimizer, 0, 4)
    if "reference" not in options:
        moor.consolidate()
        train(model, optimizer, 4, 4)
    return model, optimizer, moor


def end(model: nn.Module, optimizer: torch.optim.Optimizer, moor: mooring.Mooring) -> dict[str, torch.Tensor]:
    train(model, optimizer, 8, 6)
    moor.consolidate()
    train(model, optimizer, 14, 2)
    return {**model.state_dict(), **moor.state_dict()}


MADE = {
    "reference": lambda: {"reference": reference(), "memory": Memory()},
    "kronecker": lambda: {"reference": reference(), "importance": Kronecker(), "memory": Memory()},
    "penalty": lambda: {"importance": "mas", "pull": mooring.Penalty(3.0), "merge": "max", "buffers": "frozen"},
    "balanced": lambda: {"importance": Balanced(mooring.SI(damping=0.3)), "pull": mooring.Interpolation(root=3)},
}


@pytest.mark.parametrize("case", MADE)
def test_resumed_run_that_names_nothing_equals_the_uninterrupted_one(case):
    model, optimizer, moor = trained(**MADE[case]())
    saved = deepcopy([model.state_dict(), optimizer.state_dict(), moor.state_dict()])
    expected = end(model, optimizer, moor)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed = start()
        for part, state in zip(resumed, saved, strict=True):
            part.load_state_dict(state)
    assert repr(resumed[2]) == repr(moor).replace("tasks=2", "tasks=1")
    torch.testing.assert_close(end(*resumed), expected, rtol=0, atol=0)


def test_named_options_are_kept_and_others_are_the_states():
    *_, moor = trained(reference=reference())
    *_, other = start(pull=mooring.Budget(0.3))
    other.load_state_dict(moor.state_dict())
    assert other.pull == mooring.Budget(0.3)
    assert other.importance == mooring.EWC(decay=None, per_sample=True)


@pytest.mark.parametrize("merge", ["sum", "max", "average"])
def test_warning_of_another_merge_names_what_attach_takes(merge):
    model, optimizer, moor = trained(merge=merge)
    moor.detach()
    named = "max" if merge != "max" else "sum"
    with pytest.warns(UserWarning, match=f"give attach merge='{merge}'$"):
        mooring.attach(model, optimizer, merge=named).load_state_dict(moor.state_dict())


class Ones(Importance):
    def update(self, state, it):
        state["current"].fill_(1.0)


def test_rule_that_cannot_be_created_from_its_name_must_be_named():
    *_, moor = trained(importance=Ones())
    model, optimizer, other = start()
    before = deepcopy(other.state_dict())
    with pytest.raises(MooringError, match=r"made with importance=Ones, which Mooring cannot create .* attach import"):
        other.load_state_dict(moor.state_dict())
    torch.testing.assert_close(other.state_dict(), before, rtol=0, atol=0)
    other.detach()
    mooring.attach(model, optimizer, importance=Ones()).load_state_dict(moor.state_dict())

    *_, moor = trained(merge=lambda previous, current: previous)
    with pytest.raises(MooringError, match=r"made with merge=<lambda>, which Mooring cannot create"):
        start()[2].load_state_dict(moor.state_dict())


def test_refused_state_leaves_the_rules_and_hooks_as_they_were():
    *_, moor = trained(reference=reference())
    model, optimizer, other = start()
    spoiled = {key: tensor for key, tensor in moor.state_dict().items() if key != "anchor.0.weight"}
    with pytest.raises(MooringError, match=r"'anchor\.0\.weight' is missing"):
        other.load_state_dict(spoiled)
    assert isinstance(other.pull, mooring.Interpolation)
    train(model, optimizer, 0, 2)
    assert other.steps == 2
    assert len(model._forward_hooks) == 0  # EWC without per_sample observes no outputs


def test_loaded_rules_must_fit_the_options_that_were_named():
    *_, moor = trained(importance=Kronecker(), pull=mooring.Budget(0.1))
    with (
        pytest.raises(MooringError, match=r"Kronecker\(\) works only with a budget"),
        pytest.warns(UserWarning, match="made with Budget"),
    ):
        start(pull=mooring.Interpolation())[2].load_state_dict(moor.state_dict())
    *_, moor = trained(importance="ewc")
    with pytest.raises(MooringError, match="Interpolation"):
        start(pull=None, reference=reference(), memory=Memory(current="none"))[2].load_state_dict(moor.state_dict())


@pytest.mark.parametrize("named", [{}, {"reference": True}, {"reference": True, "memory": Memory(current="none")}])
def test_callback_with_a_state_continues_its_rules_without_reading_the_reference(named):
    model, optimizer, moor = trained(reference=reference(), memory=named.get("memory"))
    text = repr(moor)
    moor.detach()
    unread = {"reference": iter(())} if "reference" in named else {}
    other = MooringOwner(moor.state_dict(), {**named, **unread})._attach(model, optimizer)
    assert repr(other) == text
