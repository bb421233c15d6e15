"""Budget: as little pull as keeps the estimated loss on past tasks from rising by more than so many nats."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mooring.errors import check_number, check_whole, unknown
from mooring.pulls.proximal import proximal_rate
from mooring.pulls.pull import check_strength
from mooring.pulls.run_axis import Number, per_run

__all__ = ["MOST", "Budget", "budget_newton", "budget_solved", "budget_spent", "budget_step", "spent_at", "spent_each"]

CLOSE = 1e-2
"""By what part of itself a budget that is not to be passed may be left unspent."""

NEAR = (CLOSE / 6) ** 0.5
"""The part of itself by which mu may change in a step that needs no second look.

Each weight spends as (1 + mu * F)^-2, so that a step by r * mu from the aim, which is half of CLOSE below the budget,
is off by at most 3 * r^2 of it: with this r, by the other half.
"""

MOST = 8
"""Newton's steps at most; a device that is not waited for is told them all, and those after the answer do nothing."""


def spent_each(previous: Tensor, d: Tensor, mu: Number) -> tuple[Tensor, Tensor]:
    """What each weight would spend if pulled with mu, and how fast that falls with mu; elementwise.

    Example:
        >>> spent_each(torch.tensor([2.0]), torch.tensor([3.0]), mu=1.0)
        (tensor([1.]), tensor([1.3333]))
    """
    held = per_run(mu, d) * (scores := previous.clamp(min=0)) + 1
    left = d / held
    spent = scores * left.square()
    return spent / 2, spent * (scores / held)


def spent_at(previous: Tensor, d: Tensor, mu: Number) -> Tensor:
    """What a parameter would spend if pulled with mu, and how fast that falls with mu; float64.

    spent = sum(F * d^2 / (1 + mu * F)^2) / 2 and -spent' = sum(F^2 * d^2 / (1 + mu * F)^3), F being `previous`.
    Negative scores count as 0.

    Args:
        previous: F, the curvature over past tasks, (...) or (runs, ...).
        d: theta - anchor, of the same shape.
        mu: one number, or one per run.

    Returns:
        Both, of shape (2,) or (2, runs).

    Example:
        >>> spent_at(torch.tensor([2.0]), torch.tensor([3.0]), mu=1.0)
        tensor([1.0000, 1.3333], dtype=torch.float64)
    """
    each = torch.stack(spent_each(previous, d, mu))
    whole = isinstance(mu, Tensor) and mu.ndim == 1
    return each.flatten(2).sum(2, dtype=torch.float64) if whole else each.flatten(1).sum(1, dtype=torch.float64)


def budget_spent(sums: Tensor | tuple[Tensor, Tensor], nats: Number, mu: Tensor) -> Tensor:
    """Whether mu is the one: the budget is kept, and all but a hundredth of it used where mu is above 0.

    Args:
        sums: what `spent_at` gave at mu, over all parameters.
        nats: the budget; one number, or one per run.
        mu: where it was asked.

    Example:
        >>> budget_spent(torch.tensor([0.5, 1.0]), 0.4, torch.tensor(0.0))
        tensor(False)
    """
    spent, _ = sums
    return (spent <= nats) & ((mu == 0) | (spent >= (1 - CLOSE) * nats))


def budget_newton(sums: Tensor | tuple[Tensor, Tensor], nats: Number, mu: Tensor) -> Tensor:
    """A better mu: mu + 2 * spent / -spent' * (sqrt(spent / nats) - 1), not below 0.

    This is Newton's step on 1 / sqrt(spent), which is nearly straight in mu, and exactly so where all F are alike. It
    is concave: steps never pass the answer from below, and fall below it from above at once.

    Args:
        sums: what `spent_at` gave at mu, over all parameters.
        nats: the budget; one number, or one per run.
        mu: where it was asked.

    Example:
        >>> mu = budget_newton(spent_at(torch.tensor([2.0]), torch.tensor([3.0]), 0.0), 1.0, torch.tensor(0.0))
        >>> mu, spent_at(torch.tensor([2.0]), torch.tensor([3.0]), mu)[0]
        (tensor(1.0038, dtype=torch.float64), tensor(0.9950, dtype=torch.float64))
    """
    spent, slope = sums
    aim = (1 - CLOSE / 2) * torch.as_tensor(nats, dtype=spent.dtype, device=spent.device)
    step = 2 * spent / slope * ((spent / aim).sqrt() - 1)
    largest = torch.finfo(torch.float32).max
    better = torch.where(slope > 0, mu + step, 0.0)  # 0 where there is nothing to spend
    return better.nan_to_num(nan=0.0, posinf=largest).clamp(0, largest)


def budget_step(told: dict[str, Tensor]) -> None:
    """One step towards mu, in place: `mu`, and `done` (1 or 0), from `spent`, `slope` and `nats`; each a number.

    Example:
        >>> told = dict(zip(("spent", "slope", "nats", "mu", "done"), torch.tensor([0.5, 1.0, 0.6, 0.0, 0.0]).double()))
        >>> budget_step(told)
        >>> told["mu"], told["done"]
        (tensor(0., dtype=torch.float64), tensor(1., dtype=torch.float64))
    """
    mu, done = _next((told["spent"], told["slope"]), told["nats"], told["mu"], told["done"] > 0)
    told["mu"].copy_(mu)
    told["done"].copy_(torch.where(done, 1.0, 0.0))


def _next(sums: Tensor | tuple[Tensor, Tensor], nats: Number, mu: Tensor, done: Tensor) -> tuple[Tensor, Tensor]:
    """The next mu, and whether it is the answer: mu itself, or one so near that it need not be tried."""
    kept = done | budget_spent(sums, nats, mu)
    better = torch.where(kept, mu, budget_newton(sums, nats, mu))
    return better, kept | ((mu > 0) & ((better - mu).abs() <= NEAR * mu))


def budget_solved(spent: Callable[[Tensor, Tensor], Tensor], nats: Number, mu: Tensor) -> Tensor:
    """The smallest mu >= 0 that keeps the budget, by Newton's steps; each run stops at its own.

    Args:
        spent: what `spent_at` gives over all parameters at some mu; told also who is done, whose sums do not matter.
        nats: the budget; one number, or one per run.
        mu: where to begin, such as the last step's: float64, 0-d or one per run.

    Example:
        >>> previous, d = torch.tensor([2.0, 1.0]), torch.tensor([3.0, 1.0])
        >>> mu = budget_solved(lambda mu, done: spent_at(previous, d, mu), 1.0, torch.zeros((), dtype=torch.float64))
        >>> round(float(mu), 3), round(float(spent_at(previous, d, mu)[0]), 3)
        (1.098, 0.995)
    """
    waits, done = mu.device.type == "cpu", torch.zeros_like(mu, dtype=torch.bool)
    for _ in range(MOST):
        mu, done = _next(spent(mu, done), nats, mu, done)
        if waits and bool(done.all()):
            break
    return mu


@dataclass(frozen=True)
class Budget:
    """theta <- anchor + d / (1 + mu * F), with the smallest mu >= 0 that keeps sum(F * d^2) / 2 <= nats * tasks.

    F is the importance over past tasks, a curvature: `EWC(decay=None, per_sample=True)`, summed over tasks, is the
    Fisher information's diagonal, and the sum then estimates how many nats the losses on all past tasks together have
    risen since the last consolidation: at most `nats` for each of them in the mean. Nothing is pulled before the budget
    is spent. One number says how much may be forgotten; the strength of the pull follows, step by step.

    Args:
        nats: how much may be forgotten of a past task in each new one; one number, or one per run.
        every: act in each `every`-th iteration of a task.
        growth: the budget of each task over that of the one before.
        per: one budget for the whole "model", or its share for each "layer".
        over: whether `nats` are for the "mean" of past tasks, or for the "sum" of all of them, which holds tighter with
            every task.

    Example:
        >>> import mooring
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> moor = mooring.attach(model, optimizer, pull=Budget(nats=0.01))
        >>> for step in range(4):
        ...     optimizer.zero_grad()
        ...     model(torch.ones(4, 2)).mean().backward()
        ...     optimizer.step()
        ...     if step == 0:
        ...         moor.consolidate()
        >>> round(moor.pull_energy(), 5)  # to within a hundredth, from below
        0.00995
    """

    nats: Number
    every: int = 1
    growth: float = 1.0
    per: Literal["model", "layer"] = "model"
    over: Literal["mean", "sum"] = "mean"

    def __post_init__(self) -> None:
        """Refuse options outside their range."""
        check_strength(self.nats, "nats")
        check_whole("every", self.every, 1)
        check_number("growth", self.growth, 0, above=True)
        for name, given, known in (("per", self.per, ["model", "layer"]), ("over", self.over, ["mean", "sum"])):
            if given not in known:
                raise unknown(name, given, known)

    def allowed(self, task: int, groups: int = 1) -> Number:
        """What one of so many groups may spend in a task, counted from 1 for the first after a consolidation.

        Example:
            >>> Budget(0.1, growth=2.0, over="sum").allowed(task=3), round(Budget(0.1).allowed(task=3), 3)
            (0.4, 0.3)
        """
        return self.promised(task) * (task if self.over == "mean" else 1) / groups

    def promised(self, task: int) -> Number:
        """What `nats` stand for in a task: the rise of the mean of past losses, or of their sum.

        Example:
            >>> Budget(0.1, growth=2.0).promised(task=3)
            0.4
        """
        return self.nats * self.growth ** (task - 1)

    def rate(self, previous: Tensor, mu: Number) -> Tensor:
        """How far back to its anchor a parameter goes: mu * F / (1 + mu * F)."""
        return proximal_rate(previous, mu, 1.0)
