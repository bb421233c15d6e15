"""Tests that a non-finite loss or gradient stops the step before anything changes, and names the layer."""

import copy
import gc

import pytest
import torch
from torch import nn

import mooring
from mooring.backends.gradients import check_finite
from mooring.errors import NonFiniteError
from waiting import waiting_refused

IMPORTANCES = ["ewc", "mas", "si", "rwalk", "uniform", "random", mooring.EWC(labels="sampled"), mooring.Balanced("si")]
PULLS = [mooring.Interpolation(), mooring.Penalty(1.0), mooring.Proximal(1.0)]


def snapshot(model, optimizer, moor):
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"], moor.state_dict()))


@pytest.mark.parametrize("pull", PULLS, ids=lambda pull: type(pull).__name__)
@pytest.mark.parametrize("importance", IMPORTANCES, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_loss_changes_nothing_and_names_the_layer(importance, pull, bad):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    moor = mooring.attach(model, optimizer, importance=importance, pull=pull)

    def step(factor):
        optimizer.zero_grad()
        (model(torch.randn(5, 3)).square().mean() * factor).backward()
        optimizer.step()

    step(1.0)
    moor.consolidate()
    step(1.0)
    before = snapshot(model, optimizer, moor)
    with pytest.raises(NonFiniteError, match=r"gradient of '(0|2)\.(weight|bias)'.* is not finite") as error:
        step(bad)
    assert "\n" not in str(error.value)
    after = snapshot(model, optimizer, moor)
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=0)
    step(1.0)  # training continues with the next good batch


def test_error_names_the_layer_with_the_largest_share_of_bad_values():
    named = [
        ("fine", torch.ones(3)),
        ("one of four", torch.tensor([1.0, 1, 1, torch.nan])),
        ("half", torch.tensor([1, torch.inf])),
    ]
    with pytest.raises(NonFiniteError, match="'half', and of 1 more"):
        check_finite("gradient", named)


def test_overflowing_sum_of_finite_gradients_is_accepted():
    check_finite("gradient", [("huge", torch.full((10,), 3e38)), ("half", torch.full((10,), 6e4, dtype=torch.float16))])


def test_non_finite_closure_loss_stops_before_the_update():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mooring.attach(model, optimizer)
    before = model.weight.detach().clone()

    def closure():
        optimizer.zero_grad()
        loss = model(torch.full((1, 2), torch.inf)).sum()
        loss.backward()
        return loss

    with pytest.raises(NonFiniteError, match="gradient of 'weight'"):
        optimizer.step(closure)

    def finite_gradient():
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).sum() + torch.inf
        loss.backward()
        return loss

    with pytest.raises(NonFiniteError, match="the loss is inf"):
        optimizer.step(finite_gradient)
    assert torch.equal(model.weight, before)


def test_non_finite_gradient_of_an_excluded_head_stops_the_step():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mooring.attach(model, optimizer, exclude="1")
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.ones(1, 2)).sum().backward()
    model[1].weight.grad.fill_(torch.nan)
    with pytest.raises(NonFiniteError, match=r"gradient of '1\.weight'"):
        optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


@pytest.mark.filterwarnings("ignore::mooring.errors.UnheldWarning")
def test_overflowing_penalty_is_named_in_the_error():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    moor = mooring.attach(model, optimizer, importance="uniform", pull=mooring.Penalty(1e38))
    moor.consolidate()
    with torch.no_grad():
        model.weight.add_(1e6)
    before = model.weight.detach().clone()
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(NonFiniteError, match="penalized gradient of 'weight'"):
        optimizer.step()
    assert torch.equal(model.weight, before)
    assert torch.equal(model.weight.grad, torch.ones(1, 2))


def test_check_finite_false_disables_the_check():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mooring.attach(model, optimizer, check_finite=False)
    model(torch.full((1, 2), torch.inf)).sum().backward()
    optimizer.step()
    assert not bool(model.weight.isfinite().all())


@pytest.mark.parametrize("before", [True, False])
def test_garbage_collector_is_restored_after_accepted_and_refused_steps(before):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mooring.attach(model, optimizer)
    usual = gc.isenabled()
    (gc.enable if before else gc.disable)()
    try:
        model(torch.full((1, 2), torch.nan)).sum().backward()
        with pytest.raises(NonFiniteError):
            optimizer.step()
        assert gc.isenabled() is before
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        assert gc.isenabled() is before
    finally:
        (gc.enable if usual else gc.disable)()


def test_empty_gradients_are_finite():
    check_finite("gradient", [("empty", torch.zeros(0, 3)), ("one", torch.ones(1, dtype=torch.bfloat16))])
    with pytest.raises(NonFiniteError, match="'bad' is not finite"):
        check_finite("gradient", [("empty", torch.zeros(0)), ("bad", torch.tensor([torch.nan], dtype=torch.float64))])


def moored_on_a_gpu(check, pull):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    moor = mooring.attach(model, optimizer, pull=pull, check_finite=check)
    x = torch.randn(5, 3, device="cuda")

    def step(factor=1.0):
        optimizer.zero_grad()
        (model(x).square().mean() * factor).backward()
        optimizer.step()

    step()
    moor.consolidate()
    step()
    return model, optimizer, moor, step


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("pull", [*PULLS, mooring.Budget(1e-6)], ids=lambda pull: type(pull).__name__)
def test_on_a_gpu_a_bad_gradient_becomes_0_and_the_next_step_raises(pull, bad):
    model, optimizer, moor, step = moored_on_a_gpu(True, pull)
    step(bad)
    with pytest.raises(NonFiniteError, match=r"gradient of '0\.weight', and of 3 more was not finite") as error:
        step()
    assert "\n" not in str(error.value)
    for tensors in (model.state_dict(), moor.state_dict(), *optimizer.state_dict()["state"].values()):
        assert all(t.isfinite().all() for t in tensors.values() if t.is_floating_point())
    step()  # training continues
    step(bad)
    with pytest.raises(NonFiniteError):
        moor.state_dict()


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_on_a_gpu_wait_stops_before_the_step(bad):
    model, optimizer, moor, step = moored_on_a_gpu("wait", mooring.Interpolation())
    before = snapshot(model, optimizer, moor)
    with pytest.raises(NonFiniteError, match="nothing was changed"):
        step(bad)
    torch.testing.assert_close(snapshot(model, optimizer, moor), before, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("pull", [*PULLS, mooring.Budget(1e-6)], ids=lambda pull: type(pull).__name__)
def test_on_a_gpu_a_step_makes_nothing_wait(pull):
    *_, step = moored_on_a_gpu(True, pull)
    step()
    with waiting_refused():
        step()
        step()
