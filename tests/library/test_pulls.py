"""Tests of pulls: the penalty's force equals autograd, and no rate leaves the interval [0, 1]."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import mooring
from mooring.errors import MooringError
from mooring.rules import Blend
from mooring.rules.interpolation import relative_importance
from mooring.rules.penalty import penalty_force, penalty_loss
from mooring.rules.proximal import proximal_rate

F64 = torch.float64
scores = st.one_of(
    st.sampled_from([0.0, 5e-324, 1e-310, 1e300, math.inf, -1.0]), st.floats(0, 1e30), st.floats(-1e3, 1e3)
)
shapes = st.lists(st.integers(1, 4), min_size=0, max_size=3)


def tensors(shape, *seeds, dtype=F64):
    return [torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype) for seed in seeds]


@settings(deadline=None, max_examples=60)
@given(shapes, st.integers(0, 1000), st.floats(0, 1e4))
def test_penalty_force_equals_autograd_of_the_formula(shape, seed, strength):
    theta, anchor, previous = tensors(shape, seed, seed + 1, seed + 2)
    theta.requires_grad_()
    loss = strength / 2 * (previous.abs() * (theta - anchor) ** 2).sum()
    loss.backward()
    d = (theta - anchor).detach()
    torch.testing.assert_close(penalty_loss(previous.abs(), d, strength).sum(), loss.detach(), rtol=1e-12, atol=1e-12)
    force = penalty_force(previous.abs(), d, strength, lr=0.1)
    torch.testing.assert_close(force, theta.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.Adam])
def test_penalty_pull_equals_a_penalty_in_the_loss(dtype, optimizer_class):
    """The groups have their own learning rates, one parameter is frozen and one has no gradient."""
    runs = []
    for in_loss in (False, True):
        torch.manual_seed(0)
        model = nn.ModuleDict({"a": nn.Linear(3, 4), "b": nn.Linear(4, 2), "idle": nn.Linear(2, 2)}).to(dtype)
        model["a"].bias.requires_grad_(False)
        groups = [{"params": model["a"].parameters(), "lr": 0.02}, {"params": model["b"].parameters()}]
        optimizer = optimizer_class([*groups, {"params": model["idle"].parameters()}], lr=0.01)
        moor = mooring.attach(model, optimizer, pull=mooring.Penalty(0 if in_loss else 3.0))
        data = torch.Generator().manual_seed(1)
        for step in range(8):
            if step == 3:
                moor.consolidate()
            x = torch.randn(5, 3, generator=data).to(dtype)
            optimizer.zero_grad()
            loss = model["b"](model["a"](x).tanh()).square().mean()
            if in_loss and step >= 3:
                # autograd of the formula in the state's precision, added to the loss
                for name, p in model.named_parameters():
                    if name in moor.anchor:
                        d = p.to(moor.anchor[name].dtype) - moor.anchor[name]
                        loss = loss + 3.0 / 2 * (moor.previous[name] * d**2).sum().to(dtype)
            loss.backward()
            optimizer.step()
        runs.append({n: p.detach().clone() for n, p in model.named_parameters()})
        runs[-1]["idle previous"] = moor.previous.get("idle.weight", torch.zeros(1)).abs().sum()
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for name in runs[0]:
        torch.testing.assert_close(runs[0][name], runs[1][name], rtol=tolerance, atol=tolerance)


def test_gradient_after_a_penalized_step_is_the_tasks_gradient():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    moor = mooring.attach(model, optimizer, pull=mooring.Penalty(5.0))
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        own = model.weight.grad
        optimizer.step()
        assert model.weight.grad is own
        assert torch.equal(own, torch.ones(1, 2))
        moor.consolidate()


@settings(deadline=None, max_examples=300)
@given(scores, scores, st.sampled_from([1, 2, 3, 0.5]), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_relative_importance_lies_in_the_unit_interval(previous, current, root, dtype):
    p, c = torch.tensor(previous, dtype=dtype), torch.tensor(current, dtype=dtype)
    rate = relative_importance(p, c, root)
    assert 0 <= float(rate) <= 1
    if p <= 0:
        assert float(rate) == 0
    elif c <= 0:
        assert float(rate) == 1


@settings(deadline=None, max_examples=200)
@given(st.floats(1e-20, 1e20), st.floats(1e-20, 1e20), st.sampled_from([1, 2, 3]))
def test_relative_importance_is_the_papers_ratio(previous, current, root):
    p, c = torch.tensor(previous, dtype=F64), torch.tensor(current, dtype=F64)
    expected = previous ** (1 / root) / (current ** (1 / root) + previous ** (1 / root))
    assert float(relative_importance(p, c, root)) == pytest.approx(expected, rel=1e-12)


@settings(deadline=None, max_examples=300)
@given(scores, st.floats(0, 1e30), st.floats(0, 10), st.sampled_from([torch.float32, torch.float64]))
def test_the_proximal_rate_lies_in_the_unit_interval(previous, strength, lr, dtype):
    rate = float(proximal_rate(torch.tensor(previous, dtype=dtype), strength, lr))
    assert 0 <= rate <= 1
    if previous <= 0 or strength == 0 or lr == 0:
        assert rate == 0


def test_proximal_step_minimises_its_objective():
    theta, anchor, previous = tensors((6,), 0, 1, 2)
    previous, strength, lr = previous.abs(), 7.0, 0.3
    pulled = theta + proximal_rate(previous, strength, lr) * (anchor - theta)
    pulled.requires_grad_()
    objective = ((pulled - theta) ** 2 / 2 + lr * strength * previous * (pulled - anchor) ** 2 / 2).sum()
    (gradient,) = torch.autograd.grad(objective, pulled)
    assert float(gradient.abs().max()) < 1e-12


def test_clamping_caps_importance_above_which_it_extrapolates():
    previous, d = torch.tensor([0.5, 1.0, 50.0], dtype=F64), torch.full((3,), 2.0, dtype=F64)
    force = penalty_force(previous, d, strength=10.0, lr=0.05, clamp=True)
    assert force.tolist() == [10.0, 20.0, 2.0 / 0.05]
    assert penalty_force(previous, d, strength=0.0, lr=0.05, clamp=True).tolist() == [0.0, 0.0, 0.0]
    assert penalty_force(previous, d, strength=10.0, lr=0.0, clamp=True).tolist() == [10.0, 20.0, 1000.0]


def test_rules_accept_a_learning_rate_and_strength_per_run():
    previous, d = (t.abs() for t in tensors((3, 4, 2), 0, 1))
    strength, lr = torch.tensor([1.0, 10.0, 100.0], dtype=F64), torch.tensor([0.1, 0.2, 0.3], dtype=F64)
    for run in range(3):
        one = float(strength[run]), float(lr[run])
        for clamp in (False, True):
            together = penalty_force(previous, d, strength, lr, clamp)[run]
            assert torch.equal(together, penalty_force(previous[run], d[run], *one, clamp))
        assert torch.equal(proximal_rate(previous, strength, lr)[run], proximal_rate(previous[run], *one))
        pull = mooring.Penalty(strength)
        assert torch.equal(pull.force(previous, d, lr)[run], penalty_force(previous[run], d[run], *one))


def test_interpolation_acts_only_in_every_kth_step_of_a_task():
    model = nn.Linear(1, 1, bias=False).to(F64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    moor = mooring.attach(model, optimizer, importance="uniform", pull=mooring.Interpolation(every=3))
    moved = []
    for step in range(8):
        if step == 1:
            moor.consolidate()
        before = model.weight.item()
        optimizer.zero_grad()
        model(torch.ones(1, 1, dtype=F64)).sum().backward()
        optimizer.step()
        moved.append(model.weight.item() - before)
    free = pytest.approx(-0.1)
    assert [m == free for m in moved] == [True, True, True, False, True, True, False, True]


def test_stiffness_scales_the_rate():
    p, c = torch.tensor([1.0]), torch.tensor([3.0])
    full, soft = mooring.Interpolation().rate(p, c, 0.1), mooring.Interpolation(stiffness=0.25).rate(p, c, 0.1)
    assert torch.equal(soft, 0.25 * full)


def two_tasks(pull, importance="uniform", merge=None, steps=4):
    """Return the parameters after the first task, after the second, and after its consolidation."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    moor = mooring.attach(model, optimizer, importance=importance, pull=pull, merge=merge)
    seen = []
    for task in range(2):
        for _ in range(steps):
            optimizer.zero_grad()
            (model(torch.randn(5, 3, dtype=F64)) - task).square().mean().backward()
            optimizer.step()
        seen.append(model.weight.detach().clone())
        current = moor.current["weight"].clone()
        moor.consolidate()
    return *seen, model.weight.detach(), moor, current


def test_blend_acts_once_at_consolidation_and_anchors_the_result():
    first, second, blended, moor, _ = two_tasks(Blend(0.3))
    torch.testing.assert_close(blended, 0.7 * second + 0.3 * first)
    assert torch.equal(moor.anchor["weight"], blended)


def test_blend_in_every_third_iteration_does_not_act_at_consolidation():
    _, second, after, _, _ = two_tasks(Blend(0.3, every=3))
    assert torch.equal(second, after)


def test_interpolation_at_the_end_of_a_task_is_fisher_weighted_averaging():
    pull, fisher = mooring.Interpolation(root=1, every="task"), mooring.EWC(decay=None, per_sample=True)
    first, second, merged, moor, current = two_tasks(pull, fisher, "sum")
    previous = moor.previous["weight"] - current
    torch.testing.assert_close(merged, (previous * first + current * second) / (previous + current))


@settings(deadline=None, max_examples=60)
@given(*(st.one_of(st.just(0.0), st.floats(1e-30, 1e30)),) * 2, st.sampled_from([1, 2, 3]), st.floats(1e-3, 1e3))
def test_weight_multiplies_the_previous_importance(previous, current, root, weight):
    scores = torch.tensor([previous], dtype=F64), torch.tensor([current], dtype=F64)
    weighted = relative_importance(*scores, root=root, weight=weight)
    torch.testing.assert_close(
        weighted, relative_importance(scores[0] * weight, scores[1], root=root), rtol=1e-9, atol=0
    )
    weights = torch.tensor([1.0, weight], dtype=F64)
    both = relative_importance(*(t.expand(2, 1) for t in scores), root=root, weight=weights)
    torch.testing.assert_close(both[1], weighted)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Blend(1.5), "share=1.5"),
        (lambda: Blend(0.5, every="epoch"), "every='epoch'"),
        (lambda: mooring.Interpolation(every=0), "every=0"),
        (lambda: mooring.Interpolation(weight=0.0), "weight=0.0"),
        (lambda: mooring.Interpolation(stiffness=torch.tensor([0.5, 2.0])), "stiffness=2.0"),
    ],
)
def test_options_outside_their_range_are_refused_in_one_line(make, message):
    with pytest.raises(MooringError, match=message) as error:
        make()
    assert "\n" not in str(error.value)
