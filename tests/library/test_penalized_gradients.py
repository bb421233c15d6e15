"""Tests of the gradients with a penalty, which small parameters keep from step to step."""

import gc
import weakref

import pytest
import torch
from torch import nn

import mooring


def penalized(size):
    torch.manual_seed(0)
    model = nn.Linear(size, 2, bias=False).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    moor = mooring.attach(model, optimizer, pull=mooring.Penalty(10.0))
    x = torch.randn(4, size, dtype=torch.float64)
    model(x).square().mean().backward()
    optimizer.step()
    moor.consolidate()
    return model, optimizer, moor, x


@pytest.mark.parametrize("size", [3, 9000])
def test_penalized_steps_follow_the_formula_and_restore_gradients(size):
    model, optimizer, moor, x = penalized(size)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        gradient, before = model.weight.grad.clone(), model.weight.detach().clone()
        optimizer.step()
        force = 10.0 * moor.previous["weight"] * (before - moor.anchor["weight"])
        torch.testing.assert_close(model.weight.detach(), before - 0.01 * (gradient + force))
        assert torch.equal(model.weight.grad, gradient)


def test_gradient_accumulated_after_an_interrupted_step_is_not_overwritten():
    model, optimizer, moor, x = penalized(3)
    model(x).square().mean().backward()
    handle = optimizer.register_step_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("stop")))
    with pytest.raises(RuntimeError, match="stop"):
        optimizer.step()
    handle.remove()
    model(x).square().mean().backward()  # on top of whatever gradient is there
    gradient, before = model.weight.grad.clone(), model.weight.detach().clone()
    optimizer.step()
    force = 10.0 * moor.previous["weight"] * (before - moor.anchor["weight"])
    torch.testing.assert_close(model.weight.detach(), before - 0.01 * (gradient + force))
    assert torch.equal(model.weight.grad, gradient)


def test_step_over_many_parameters_makes_no_object_for_each_and_keeps_no_gradient():
    """Objects that live from the hook before a step to the one after make Python's collector run in each step."""
    model = nn.ParameterList(torch.randn(2) for _ in range(1500))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    moor = mooring.attach(model, optimizer, importance="ewc", pull=mooring.Penalty(1.0))
    alive = []
    optimizer.register_step_pre_hook(lambda *_: alive.append(len(gc.get_objects())))  # after that of the mooring
    for number in range(4):
        for p in model:
            p.grad = torch.ones_like(p)
        before = len(gc.get_objects())
        optimizer.step()
        if number == 1:
            moor.consolidate()
    assert alive[-1] - before < 100
    kept = weakref.ref(model[0].grad)
    optimizer.zero_grad()
    assert kept() is None
