"""Tests of stability: verdicts agree with simulation on quadratics, and the unrolled form equals the iterates."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import mooring
from mooring import stability
from mooring.rules import Importance

pytestmark = pytest.mark.filterwarnings("ignore::mooring.errors.UnheldWarning")  # tests displace parameters by hand

TINY = 1e-100  # its square vanishes next to eps = 1, so that Adam's preconditioner is constant


class FixedScores(Importance):
    """Fixed scores."""

    merges = False

    def __init__(self, scores: Tensor) -> None:
        self.scores = scores

    def start(self, like: Tensor, *, name: str, task: int) -> dict[str, Tensor]:
        return {"current": self.scores.to(like).reshape(like.shape).clone()}


class Point(nn.Module):
    """A parameter vector without a task."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(size, dtype=torch.float64))


def displaced(make, p, lr=0.5, strength=4.0, start=1.0):
    """Return a moored point at distance `start` from its anchor, where lr * strength * importance = p elementwise."""
    p = torch.as_tensor(p, dtype=torch.float64)
    model = Point(p.numel())
    optimizer = make([model.theta], lr)
    moor = mooring.attach(
        model,
        optimizer,
        importance=FixedScores(p / (lr * strength)),
        pull=mooring.Penalty(strength),
        check_finite=False,
    )
    moor.consolidate()
    with torch.no_grad():
        model.theta.fill_(start)
    return model, optimizer, moor


def moored_path(make, p, steps, start=1.0):
    """Return the displacements of a moored quadratic without a task, relative to the start: (steps + 1, parameters)."""
    model, optimizer, _ = displaced(make, p, start=start)
    path = [model.theta.detach().clone()]
    for _ in range(steps):
        model.theta.grad = torch.zeros_like(model.theta)
        optimizer.step()
        path.append(model.theta.detach().clone())
    return torch.stack(path) / start


def sgd(**options):
    return lambda params, lr: torch.optim.SGD(params, lr=lr, **options)


def limit_of(make) -> float:
    optimizer = make([nn.Parameter(torch.zeros(1))], 0.1)
    return stability.divergence_limit(optimizer, optimizer.param_groups[0])


SGDS = {
    "plain": (sgd(), 2.0),
    "momentum 0.3": (sgd(momentum=0.3), 2.6),
    "momentum 0.5": (sgd(momentum=0.5), 3.0),
    "momentum 0.9": (sgd(momentum=0.9), 3.8),
    "momentum 0.97": (sgd(momentum=0.97), 3.94),
    "dampening 0.5": (sgd(momentum=0.9, dampening=0.5), 7.6),
    "dampening 0.9": (sgd(momentum=0.9, dampening=0.9), 38.0),
    "nesterov 0.5": (sgd(momentum=0.5, nesterov=True), 1.5),
    "nesterov 0.9": (sgd(momentum=0.9, nesterov=True), 3.8 / 2.8),
    "dampening without momentum, which torch ignores": (sgd(dampening=0.5), 2.0),
}


@pytest.mark.parametrize(("make", "expected"), SGDS.values(), ids=SGDS.keys())
def test_limit_separates_contracting_from_diverging_moored_sgd_runs(make, expected):
    path = moored_path(make, [0.98 * expected, 1.02 * expected], steps=800)
    below, above = path[-20:].abs().amax(0).tolist()
    assert below < 1e-4
    assert above > 1e4
    assert limit_of(make) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("make", [make for make, _ in SGDS.values()], ids=SGDS.keys())
def test_verdict_of_each_parameter_agrees_with_its_simulation(make):
    limit = limit_of(make)
    p = torch.tensor([-0.3, -0.02, 0.0, 0.1, 0.9, 0.97 * limit, 1.03 * limit, 1.3 * limit], dtype=torch.float64)
    path = moored_path(make, p, steps=1000)
    late = path[-20:].abs().amax(0)
    exploded = ~(late < 1e3)  # overflow counts as diverging
    counts = stability.verdicts(p, limit)
    assert counts.diverge == int(exploded.sum())
    assert counts.free == int((late == 1).sum()) == 1
    assert counts.interpolate + counts.extrapolate == int((late < 1e-3).sum())


@settings(max_examples=60, deadline=None)
@given(
    beta=st.floats(0.0, 0.95),
    dampening=st.floats(0.0, 0.9),
    nesterov=st.booleans(),
    part=st.one_of(st.floats(0.02, 0.98), st.floats(1.02, 1.5)),
)
def test_verdict_agrees_with_simulation_for_any_momentum(beta, dampening, nesterov, part):
    nesterov = nesterov and beta > 0
    theta = nn.Parameter(torch.ones((), dtype=torch.float64))
    options = {"nesterov": True} if nesterov else {"dampening": dampening if beta > 0 else 0.0}
    optimizer = torch.optim.SGD([theta], lr=0.25, momentum=beta, foreach=False, **options)
    limit = stability.divergence_limit(optimizer, optimizer.param_groups[0])
    p = part * limit
    quiet, size = 0, 1.0
    for _ in range(4000):  # until it is far away, or stays at the anchor
        theta.grad = theta.detach() * (p / 0.25)
        optimizer.step()
        size = abs(theta.item())
        quiet = quiet + 1 if size < 1e-6 else 0
        if size > 1e6 or quiet == 30:
            break
    assert size > 1e6 or quiet == 30, "neither contracted nor diverged"
    counts = stability.verdicts(torch.tensor([p]), limit)
    assert counts.diverge == (size > 1e6)
    assert counts.interpolate + counts.extrapolate == (size < 1e-6)


def test_penalty_never_diverges_with_dampening_1():
    make = sgd(momentum=0.5, dampening=1.0)
    path = moored_path(make, [0.3, 50.0, 5000.0], steps=200)
    assert torch.equal(path[-1], path[-2])  # momentum fades away
    assert limit_of(make) == math.inf


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0.001, 0.999), min_size=1, max_size=6))
def test_below_1_gradient_descent_moves_monotonically_towards_the_anchor(p):
    path = moored_path(sgd(), p, steps=12)
    assert (path[1:] > 0).all()
    assert (path[1:] < path[:-1]).all()
    expected = (1 - torch.tensor(p, dtype=torch.float64)) ** 12
    torch.testing.assert_close(path[-1], expected, rtol=1e-10, atol=0)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(1.001, 1.999), min_size=1, max_size=6))
def test_between_1_and_2_gradient_descent_overshoots_the_anchor_in_each_step_and_contracts(p):
    path = moored_path(sgd(), p, steps=12)
    assert (path[1:] * path[:-1] < 0).all()
    assert (path[1:].abs() < path[:-1].abs()).all()


def test_p_of_1_lands_on_the_anchor_and_p_of_2_oscillates():
    path = moored_path(sgd(), [1.0, 2.0], steps=6)
    assert path[:, 0].tolist() == [1, 0, 0, 0, 0, 0, 0]
    assert path[:, 1].tolist() == [1, -1, 1, -1, 1, -1, 1]
    counts = stability.verdicts(torch.tensor([1.0, 2.0]), 2.0)
    assert (counts.interpolate, counts.extrapolate, counts.diverge) == (0, 1, 1)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(-1.5, -0.001), min_size=1, max_size=4), st.sampled_from([0.0, 0.5, 0.9]))
def test_negative_p_pushes_parameters_ever_further_from_their_anchors(p, beta):
    path = moored_path(sgd(momentum=beta), p, steps=15)
    steps = path.diff(dim=0)
    assert (steps > 0).all()
    assert (steps[1:] > steps[:-1]).all()  # at a growing rate
    assert stability.verdicts(torch.tensor(p), 2.0).negative == len(p)


# Equation 4


def trained_regression(strength, lr, tasks=1):
    """Return a moored float64 network after `tasks` consolidated tasks, and a function that takes one more step."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    moor = mooring.attach(model, optimizer, importance="ewc", pull=mooring.Penalty(strength))

    def step():
        optimizer.zero_grad()
        x = torch.randn(5, 3, dtype=torch.float64)
        (model(x) - x[:, :2].sin()).square().mean().backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        return gradients

    for _ in range(tasks):
        for _ in range(6):
            step()
        moor.consolidate()
    return model, moor, step


@pytest.mark.parametrize("tasks", [1, 2])
@pytest.mark.parametrize("strength", [0.0, 30.0, 2000.0])
def test_unrolled_equation_4_equals_the_iterates_of_a_moored_run(strength, tasks):
    model, moor, step = trained_regression(strength, lr=0.05, tasks=tasks)
    previous = {name: score.clone() for name, score in moor.previous.items()}
    if strength:
        assert max(float(s.max()) for s in previous.values()) * 0.05 * strength > 0.01  # the penalty has an effect
    n = 25
    gradients = [step() for _ in range(n)]
    for name, theta in model.named_parameters():
        method = moor.anchor[name].clone()
        function = moor.anchor[name].clone()
        by_hand = moor.anchor[name].clone()
        for j, g in enumerate(gradients):
            i = n - 1 - j
            method -= moor.effective_learning_rate(i)[name] * g[name]
            function -= stability.effective_learning_rate(0.05, strength, previous[name], i) * g[name]
            by_hand -= 0.05 * (1 - 0.05 * strength * previous[name]) ** i * g[name]
        assert float((theta.detach() - moor.anchor[name]).abs().max()) > 1e-4  # it moved
        for unrolled in (method, function, by_hand):
            torch.testing.assert_close(theta.detach(), unrolled, rtol=1e-10, atol=1e-10)


def test_effective_learning_rate_accepts_another_strength_than_the_pulls():
    _, moor, _ = trained_regression(strength=30.0, lr=0.05)
    for name, rate in moor.effective_learning_rate(3, strength=7.0).items():
        expected = 0.05 * (1 - 0.05 * 7.0 * moor.previous[name]) ** 3
        torch.testing.assert_close(rate, expected, rtol=1e-12, atol=0)


# The largest safe strength

scores = st.lists(st.floats(1e-12, 1e12), min_size=1, max_size=20)


@settings(max_examples=100, deadline=None)
@given(st.floats(1e-6, 10.0), scores)
def test_largest_safe_strength_is_the_limit_of_interpolation(lr, values):
    importance = torch.tensor(values, dtype=torch.float64)
    safe = stability.largest_safe_strength(lr, importance)
    below = stability.interpolation_weight(lr, 0.999 * safe, importance)
    above = stability.interpolation_weight(lr, 1.001 * safe, importance)
    assert stability.verdicts(below, 2.0).interpolate == len(values)
    assert stability.verdicts(above, 2.0).interpolate < len(values)


def test_moored_run_overshoots_only_above_the_largest_safe_strength():
    importance = torch.tensor([0.2, 3.0, 1.1], dtype=torch.float64)
    safe = stability.largest_safe_strength(0.5, importance)
    assert safe == pytest.approx(1 / 1.5, rel=1e-12)
    for factor, overshoots in ((0.999, [False, False, False]), (1.001, [False, True, False])):
        path = moored_path(sgd(), 0.5 * factor * safe * importance, steps=1)
        assert (path[1] < 0).tolist() == overshoots


@pytest.mark.parametrize("importance", [[], [0.0, 0.0], [-1.0, -2.0]], ids=["empty", "zero", "negative"])
def test_largest_safe_strength_is_infinite_without_importance(importance):
    assert stability.largest_safe_strength(0.1, torch.tensor(importance)) == math.inf


# Optimizers with a rate per parameter


def adam(kind=torch.optim.Adam, **options):
    return lambda params, lr: kind(params, lr=lr, eps=1.0, **options)


ADAMS = {
    "Adam": adam(),
    "Adam b1=0.5": adam(betas=(0.5, 0.99)),
    "Adam b1=0": adam(betas=(0.0, 0.99)),
    "Adam amsgrad": adam(amsgrad=True),
    "AdamW": adam(torch.optim.AdamW, weight_decay=0.0),
    "RAdam": adam(torch.optim.RAdam, betas=(0.9, 0.9)),
    "NAdam": adam(torch.optim.NAdam, momentum_decay=100.0),  # without warm-up of the momentum
    "RMSprop": adam(torch.optim.RMSprop),
    "RMSprop with momentum": adam(torch.optim.RMSprop, momentum=0.9),
}


@pytest.mark.slow
@pytest.mark.parametrize("make", ADAMS.values(), ids=ADAMS.keys())
def test_limit_holds_for_adaptive_optimizers_with_a_constant_preconditioner(make):
    limit = limit_of(make)
    path = moored_path(make, [0.97 * limit, 1.03 * limit], steps=1500, start=TINY)
    below, above = path[-20:].abs().amax(0).tolist()
    assert below < 1e-4
    assert above > 1e4


def test_limit_holds_for_adams_update_by_hand_at_the_rates_of_a_trained_adam():
    torch.manual_seed(0)
    theta = nn.Parameter(torch.randn(6, dtype=torch.float64))
    optimizer = torch.optim.Adam([theta], lr=0.01, betas=(0.8, 0.99))
    for _ in range(30):
        theta.grad = torch.randn(6, dtype=torch.float64) * torch.logspace(-3, 2, 6, dtype=torch.float64)
        optimizer.step()
    rate = stability.learning_rates(optimizer)[theta]
    limit = stability.divergence_limit(optimizer, optimizer.param_groups[0])
    assert limit == pytest.approx(18.0, rel=1e-12)
    for factor, diverges in ((0.99, False), (1.01, True)):
        curvature = factor * limit / rate  # strength * importance of each parameter
        assert stability.verdicts(rate * curvature, limit).diverge == (6 if diverges else 0)
        d, m = torch.ones(6, dtype=torch.float64), torch.zeros(6, dtype=torch.float64)
        vhat = optimizer.state[theta]["exp_avg_sq"] / (1 - 0.99**30)
        for t in range(1, 401):
            m = 0.8 * m + 0.2 * curvature * d
            d = d - 0.01 * m / (1 - 0.8**t) / (vhat.sqrt() + 1e-8)
        assert (d.abs() > 1e4).all() if diverges else (d.abs() < 1e-4).all()


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_learning_rates_of_adam_are_lr_over_root_vhat_plus_eps(kind, amsgrad):
    torch.manual_seed(0)
    a, b = nn.Parameter(torch.ones(3, dtype=torch.float64)), nn.Parameter(torch.ones(2, 2, dtype=torch.float64))
    groups = [{"params": [a]}, {"params": [b], "lr": 0.3, "betas": (0.7, 0.8), "eps": 1e-3}]
    optimizer = kind(groups, lr=0.02, betas=(0.9, 0.95), eps=1e-6, amsgrad=amsgrad)
    v = {a: torch.zeros_like(a), b: torch.zeros_like(b)}
    largest = dict(v)
    decay = {a: 0.95, b: 0.8}
    for t in range(1, 8):
        for p in (a, b):
            p.grad = torch.randn_like(p) / t**2  # shrinking, so that amsgrad's maximum is not the last
            v[p] = decay[p] * v[p] + (1 - decay[p]) * p.grad.square()
            largest[p] = torch.maximum(largest[p], v[p])
        optimizer.step()
        rates = stability.learning_rates(optimizer)
        for p, lr, eps in ((a, 0.02, 1e-6), (b, 0.3, 1e-3)):
            vhat = (largest if amsgrad else v)[p] / (1 - decay[p] ** t)
            torch.testing.assert_close(rates[p], (lr / (vhat.sqrt() + eps)).detach(), rtol=1e-12, atol=0)
    if amsgrad:
        assert not torch.equal(largest[a], v[a])


STEPPERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.1, betas=(0.0, 0.9)),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.1, betas=(0.0, 0.9)),
    "RAdam": lambda params: torch.optim.RAdam(params, lr=0.1, betas=(0.0, 0.9)),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.1),
    "RMSprop centered": lambda params: torch.optim.RMSprop(params, lr=0.1, centered=True),
}


def stepped(make, steps):
    """Return the rates after some steps, and the last step's movement per unit of gradient."""
    torch.manual_seed(1)
    theta = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    optimizer = make([theta])
    for _ in range(steps):
        before = theta.detach().clone()
        theta.grad = torch.randn(4, dtype=torch.float64)
        optimizer.step()
    rate = torch.as_tensor(stability.learning_rates(optimizer)[theta], dtype=torch.float64).expand(4)
    return rate, (before - theta.detach()) / theta.grad


@pytest.mark.parametrize("make", STEPPERS.values(), ids=STEPPERS.keys())
def test_learning_rate_is_what_a_step_without_momentum_moves_along_the_gradient(make):
    rate, moved = stepped(make, steps=400)  # RAdam's rectification is 1 by then
    torch.testing.assert_close(rate, moved, rtol=1e-6, atol=0)


def test_adadelta_is_not_taken_for_rmsprop():
    rate, moved = stepped(lambda params: torch.optim.Adadelta(params, lr=0.1), steps=60)
    as_documented = torch.equal(rate, torch.full_like(rate, 0.1))  # the group's lr
    assert as_documented or torch.allclose(rate, moved, rtol=0.5, atol=0)


def test_rescales_is_true_for_adam_after_a_step():
    for make, expected in ((sgd(momentum=0.9), False), (adam(), True), (adam(torch.optim.RMSprop), True)):
        theta = nn.Parameter(torch.zeros(2))
        optimizer = make([theta], 0.1)
        assert stability.learning_rates(optimizer) == {theta: 0.1}
        assert not stability.rescales(optimizer)
        theta.grad = torch.ones(2)
        optimizer.step()
        assert stability.rescales(optimizer) == expected


def test_learning_rates_does_not_change_the_optimizer():
    theta = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.Adam([theta], lr=0.1)
    stability.learning_rates(optimizer)
    assert not optimizer.state  # a defaultdict that must not grow


# Counting

anything = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True, width=32),
    st.sampled_from([0.0, -0.0, 1.0, 2.0, 3.8, 1e-42, -1e-42, 5e-324, math.nan, math.inf, -math.inf]),
    st.floats(-3.0, 5.0),
)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(anything, max_size=30),
    st.sampled_from([4 / 3, 2.0, 3.8, 38.0, math.inf]),
    st.sampled_from([torch.float64, torch.float32]),
)
def test_verdicts_partition_the_parameters(values, limit, dtype):
    p = torch.tensor(values, dtype=dtype)
    counts = stability.verdicts(p, limit)
    limit = float(torch.tensor(limit, dtype=dtype))  # as torch compares
    expected = {"free": 0, "interpolate": 0, "extrapolate": 0, "diverge": 0, "negative": 0}
    for value in p.tolist():
        if value == 0:
            expected["free"] += 1
        elif 0 < value < 1:
            expected["interpolate"] += 1
        elif 1 <= value < limit:
            expected["extrapolate"] += 1
        else:
            expected["diverge"] += 1
            expected["negative"] += value < 0
    assert counts == stability.Verdicts(**expected)
    assert counts.free + counts.interpolate + counts.extrapolate + counts.diverge == len(values)


# The run axis


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.floats(1e-3, 1.0), st.floats(0.0, 100.0)), min_size=1, max_size=5),
    st.sampled_from([(), (3,), (2, 3), (2, 1, 3)]),
    st.integers(0, 5),
)
def test_stacked_runs_equal_each_run_alone(runs, shape, i):
    generator = torch.Generator().manual_seed(len(runs))
    importance = torch.rand(len(runs), *shape, dtype=torch.float64, generator=generator)
    lr = torch.tensor([lr for lr, _ in runs], dtype=torch.float64)
    strength = torch.tensor([strength for _, strength in runs], dtype=torch.float64)
    together = stability.interpolation_weight(lr, strength, importance)
    unrolled = stability.effective_learning_rate(lr, strength, importance, i)
    assert together.shape == unrolled.shape == importance.shape
    for run, (own_lr, own_strength) in enumerate(runs):
        alone = stability.interpolation_weight(own_lr, own_strength, importance[run])
        torch.testing.assert_close(together[run], alone, rtol=1e-14, atol=0)
        alone = stability.effective_learning_rate(own_lr, own_strength, importance[run], i)
        torch.testing.assert_close(unrolled[run], alone, rtol=1e-12, atol=1e-300)
    alone = [stability.largest_safe_strength(lr, importance[run]) for run, (lr, _) in enumerate(runs)]
    assert stability.largest_safe_strength(lr, importance) == pytest.approx(min(alone), rel=1e-12)
