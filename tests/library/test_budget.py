"""Tests of Budget: the smallest pull that keeps the estimated rise of the loss within a number of nats."""

import math
from copy import deepcopy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import mooring
from mooring.errors import MooringError
from mooring.rules.budget import (
    MAX_NEWTON_STEPS,
    MU_TOLERANCE,
    UNSPENT_TOLERANCE,
    budget_newton,
    budget_solved,
    budget_spent,
    spent_at,
)

F64 = torch.float64


def answer(previous: torch.Tensor, d: torch.Tensor, nats: float) -> float:
    """Compute mu by bisection from the definition."""

    def spent(mu: float) -> float:
        return float((previous * (d / (1 + mu * previous)).square()).sum() / 2)

    if spent(0.0) <= nats:
        return 0.0
    low, high = 0.0, 1.0
    while spent(high) > nats:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if spent(middle) > nats else (low, middle)
    return high


def search(previous: torch.Tensor, d: torch.Tensor, nats: float, mu: float = 0.0) -> tuple[torch.Tensor, int]:
    at, steps = torch.tensor(mu, dtype=F64), 0
    while not budget_spent(sums := spent_at(previous, d, at), nats, at):
        at, steps = budget_newton(sums, nats, at), steps + 1
        assert steps < 60
    return at, steps


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 1e6), st.floats(-10, 10)), min_size=1, max_size=30),
    st.floats(1e-6, 1e3),
    st.floats(0, 1e6),
)
def test_mu_is_the_smallest_that_keeps_the_budget(pairs, nats, begin):
    previous, d = torch.tensor(pairs, dtype=F64).unbind(1)
    mu, _ = search(previous, d, nats, begin)
    spent = float(spent_at(previous, d, mu)[0])
    assert spent <= nats
    if mu:
        assert spent >= (1 - UNSPENT_TOLERANCE) * nats
        assert float(mu) >= answer(previous, d, nats) * (1 - 1e-9)
    else:
        assert answer(previous, d, nats) == 0


def test_slope_equals_the_derivative_of_what_is_spent():
    torch.manual_seed(0)
    previous, d = torch.rand(40, dtype=F64) * 9, torch.randn(40, dtype=F64)
    mu = torch.tensor(0.7, dtype=F64, requires_grad=True)
    held = 1 + mu * previous
    spent = (previous * (d / held).square()).sum() / 2
    (slope,) = torch.autograd.grad(spent, mu)
    torch.testing.assert_close(spent_at(previous, d, 0.7), torch.stack([spent.detach(), -slope]))


def test_newton_needs_few_steps_and_at_most_three_from_a_close_start():
    torch.manual_seed(0)
    previous, d = torch.rand(10_000, dtype=F64) ** 8 * 100, torch.randn(10_000, dtype=F64) * 0.1
    for nats in (1e-6, 1e-3, 1.0, 100.0):
        mu, cold = search(previous, d, nats)
        assert cold <= 8
        for aside in (0.8, 0.98, 1.02, 1.2):
            assert search(previous, d, nats, float(mu) * aside)[1] <= 3


def test_negative_scores_count_as_zero():
    previous, d = torch.tensor([-5.0, 2.0]), torch.tensor([3.0, 1.0])
    assert spent_at(previous, d, 0.0).tolist() == spent_at(previous.clamp(min=0), d, 0.0).tolist() == [1.0, 4.0]


def test_stacked_runs_equal_each_run_alone():
    torch.manual_seed(0)
    previous, d, mu = torch.rand(3, 4, 5), torch.randn(3, 4, 5), torch.tensor([0.0, 1.0, 30.0])
    together = spent_at(previous, d, mu)
    for run in range(3):
        torch.testing.assert_close(together[:, run], spent_at(previous[run], d[run], float(mu[run])))


# In a training loop


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(F64)


def trained(model, optimizer, moor, steps, seed, after_step=lambda: None):
    random = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(16, 6, generator=random, dtype=F64)
        y = torch.randint(3, (16,), generator=random)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x) * (1 + seed), y).backward()
        optimizer.step()
        after_step()
    moor.consolidate()


def moored(pull, **options):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    return model, optimizer, mooring.attach(model, optimizer, pull=pull, **options)


@pytest.mark.parametrize("nats", [1e-5, 1e-3, 0.05])
def test_budget_is_kept_and_used_up(nats):
    model, optimizer, moor = moored(mooring.Budget(nats))
    trained(model, optimizer, moor, 30, 0)
    spent = []
    trained(model, optimizer, moor, 40, 1, lambda: spent.append(moor.pull_energy()))
    assert max(spent) <= nats * (1 + 1e-12)
    assert max(spent) >= (1 - UNSPENT_TOLERANCE) * nats
    free, optimizer, moor = moored(mooring.Budget(1e6))
    trained(free, optimizer, moor, 30, 0)
    trained(free, optimizer, moor, 40, 1)
    moved = sum(
        float((p - q).detach().square().sum()) for p, q in zip(model.parameters(), free.parameters(), strict=True)
    )
    assert moved > 0


def test_training_within_the_budget_equals_plain_fine_tuning_bit_for_bit():
    model, optimizer, moor = moored(mooring.Budget(1e9))
    plain, plain_optimizer, plain_moor = moored(mooring.Interpolation(stiffness=0.0))
    for seed in (0, 1):
        trained(model, optimizer, moor, 20, seed)
        trained(plain, plain_optimizer, plain_moor, 20, seed)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)


def test_pull_projects_onto_the_budget():
    """The result is the point within the budget that is closest to where the optimizer stepped."""
    model, optimizer, moor = moored(mooring.Budget(1e-3))
    trained(model, optimizer, moor, 30, 0)
    free, free_optimizer, free_moor = moored(
        mooring.Interpolation(stiffness=0.0), importance=mooring.EWC(decay=None, per_sample=True)
    )
    trained(free, free_optimizer, free_moor, 30, 0)
    anchor = {name: tensor.clone() for name, tensor in moor.anchor.items()}
    previous = {name: tensor.clone() for name, tensor in moor.previous.items()}
    random = torch.Generator().manual_seed(5)
    x, y = torch.randn(16, 6, generator=random, dtype=F64), torch.randint(3, (16,), generator=random)
    for net, opt in ((model, optimizer), (free, free_optimizer)):
        opt.zero_grad()
        (30 * nn.functional.cross_entropy(net(x), y)).backward()
        opt.step()
    free_parameters = dict(free.named_parameters())
    flat = lambda tensors: torch.cat([tensors[name].detach().flatten() for name in anchor])  # noqa: E731
    f, d = flat(previous), flat(free_parameters) - flat(anchor)
    mu = answer(f, d, 1e-3)
    assert mu > 0
    expected = flat(anchor) + d / (1 + mu * f)
    torch.testing.assert_close(flat(dict(model.named_parameters())), expected, rtol=0, atol=1e-3 * float(d.abs().max()))


def test_nats_limit_the_mean_over_past_tasks():
    model, optimizer, moor = moored(mooring.Budget(1e-4))
    for task in range(3):
        trained(model, optimizer, moor, 30, task)
    spent = []
    trained(model, optimizer, moor, 40, 3, lambda: spent.append(moor.pull_energy()))
    assert max(spent) == pytest.approx(3e-4, rel=UNSPENT_TOLERANCE)
    assert max(spent) <= 3e-4 * (1 + 1e-12)


def test_parameters_without_a_gradient_count_towards_the_budget():
    model, optimizer, moor = moored(mooring.Budget(1e-3))
    trained(model, optimizer, moor, 30, 0)
    trained_some = list(model[2].parameters())
    for p in trained_some:
        p.requires_grad_(False)
    random = torch.Generator().manual_seed(7)
    for step in range(30):
        if step == 15:  # now the other layer trains, and the first one stays
            for p in model.parameters():
                p.requires_grad_(not p.requires_grad)
        x, y = torch.randn(16, 6, generator=random, dtype=F64), torch.randint(3, (16,), generator=random)
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(3 * model(x), y).backward()
        optimizer.step()
        assert moor.pull_energy() <= 1e-3 * (1 + 1e-9)


def test_zero_budget_keeps_important_parameters_at_their_anchors():
    model, optimizer, moor = moored(mooring.Budget(0.0))
    trained(model, optimizer, moor, 30, 0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trained(model, optimizer, moor, 20, 1)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), before[name], rtol=1e-6, atol=1e-9)


def test_resumed_budget_equals_uninterrupted_training():
    model, optimizer, moor = moored(mooring.Budget(1e-3))
    trained(model, optimizer, moor, 30, 0)
    random = torch.Generator().manual_seed(3)
    batches = [torch.randn(16, 6, generator=random, dtype=F64) for _ in range(10)]

    def continue_training(model, optimizer, xs):
        for x in xs:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    continue_training(model, optimizer, batches[:5])
    assert math.isfinite(moor._step.budget.mu.item())
    resumed, resumed_optimizer, resumed_moor = moored(mooring.Budget(1e-3))
    resumed.load_state_dict(model.state_dict())
    resumed_optimizer.load_state_dict(deepcopy(optimizer.state_dict()))
    resumed_moor.load_state_dict(moor.state_dict())
    continue_training(model, optimizer, batches[5:])
    continue_training(resumed, resumed_optimizer, batches[5:])
    for p, q in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: mooring.Budget(-1.0), "nats=-1.0"),
        (lambda: mooring.Budget(math.nan), "nats=nan"),
        (lambda: mooring.Budget(1.0, every=0), "every=0"),
        (lambda: moored(mooring.Budget(torch.tensor([1.0, 2.0]))), "has a value per run"),
    ],
)
def test_bad_options_are_refused_in_one_line(make, line):
    with pytest.raises(MooringError, match=line.replace("'", ".")) as error:
        make()
    assert "\n" not in str(error.value)


@settings(max_examples=200, deadline=None)
@given(
    scores=st.lists(st.floats(-12, 12), min_size=1, max_size=30),
    spread=st.floats(0, 4),
    begin=st.floats(-12, 12),
    left=st.floats(0.5, 2.0),
    seed=st.integers(0, 10_000),
)
def test_unverified_last_step_stays_within_a_hundredth_below_the_budget(scores, spread, begin, left, seed):
    torch.manual_seed(seed)
    previous = torch.tensor(scores, dtype=F64).exp()
    d = torch.randn(len(scores), dtype=F64) * (spread * torch.randn(len(scores), dtype=F64)).exp()
    begin = torch.tensor(begin, dtype=F64).exp()
    nats = left * float(spent_at(previous, d, begin)[0])
    tried = []

    def spent(mu, done):
        tried.append(float(mu))
        return spent_at(previous, d, mu)

    mu = budget_solved(spent, nats, begin)
    kept = float(spent_at(previous, d, mu)[0])
    if len(tried) < MAX_NEWTON_STEPS:  # it converged
        assert kept <= nats * (1 + 1e-9)
        assert float(mu) == 0 or kept >= (1 - UNSPENT_TOLERANCE) * nats * (1 - 1e-9)
    assert abs(float(mu) - tried[-1]) <= MU_TOLERANCE * tried[-1] or len(tried) == MAX_NEWTON_STEPS
