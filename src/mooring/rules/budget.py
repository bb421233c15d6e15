"""Budget: the weakest pull that keeps the estimated rise of the loss on past tasks within a number of nats."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mooring.errors import MooringError, check_whole
from mooring.rules.proximal import proximal_rate
from mooring.rules.pull import Number, check_numbers, per_run

UNSPENT_TOLERANCE = 1e-2
"""The fraction of a budget that may stay unspent; the budget itself is never exceeded."""

MU_TOLERANCE = (UNSPENT_TOLERANCE / 6) ** 0.5
"""The relative change of mu below which Newton's method stops without another evaluation.

Each weight spends as (1 + mu * F)^-2, so a step of r * mu misses the target by at most 3 * r^2 of it. The target lies
half of UNSPENT_TOLERANCE below the budget, and with this r the error is at most the other half.
"""

MAX_NEWTON_STEPS = 8
"""Upper limit of Newton steps; a GPU runs all of them, to avoid a synchronisation, and the surplus ones do nothing."""


def spent_each(previous: Tensor, d: Tensor, mu: Number) -> tuple[Tensor, Tensor]:
    """Return what each weight spends if pulled with mu, and minus its derivative in mu; elementwise.

    Example:
        >>> spent_each(torch.tensor([2.0]), torch.tensor([3.0]), mu=1.0)
        (tensor([1.]), tensor([1.3333]))
    """
    scores = previous.clamp(min=0)
    shrinkage = per_run(mu, d) * scores + 1
    spent = scores * (d / shrinkage).square()
    return spent / 2, spent * (scores / shrinkage)


def spent_at(previous: Tensor, d: Tensor, mu: Number) -> Tensor:
    """Return what a parameter spends if pulled with mu, and minus its derivative in mu; float64.

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
    dim = 2 if isinstance(mu, Tensor) and mu.ndim == 1 else 1  # keep the run axis
    terms = torch.stack(spent_each(previous, d, mu)).unsqueeze(-1)  # a scalar parameter has no dimension to flatten
    return terms.flatten(dim).sum(dim, dtype=torch.float64)


def budget_spent(sums: Tensor | tuple[Tensor, Tensor], nats: Number, mu: Tensor) -> Tensor:
    """Return whether mu solves the budget: it is kept and, if mu is above 0, used but for a hundredth.

    Args:
        sums: the sum of `spent_at` at mu over all parameters.
        nats: the budget; one number, or one per run.
        mu: the value that `sums` belong to.

    Example:
        >>> budget_spent(torch.tensor([0.5, 1.0]), 0.4, torch.tensor(0.0))
        tensor(False)
    """
    spent, _ = sums
    return (spent <= nats) & ((mu == 0) | (spent >= (1 - UNSPENT_TOLERANCE) * nats))


def budget_newton(sums: Tensor | tuple[Tensor, Tensor], nats: Number, mu: Tensor) -> Tensor:
    """Return the next mu: mu + 2 * spent / -spent' * (sqrt(spent / nats) - 1), at least 0.

    This is Newton's step on 1 / sqrt(spent), which is nearly linear in mu, and exactly linear if all F are equal. It is
    concave: steps from below never exceed the solution, and a step from above falls below it at once. The arguments are
    those of `budget_spent`.

    Example:
        >>> mu = budget_newton(spent_at(torch.tensor([2.0]), torch.tensor([3.0]), 0.0), 1.0, torch.tensor(0.0))
        >>> mu, spent_at(torch.tensor([2.0]), torch.tensor([3.0]), mu)[0]
        (tensor(1.0038, dtype=torch.float64), tensor(0.9950, dtype=torch.float64))
    """
    spent, slope = sums
    target = (1 - UNSPENT_TOLERANCE / 2) * torch.as_tensor(nats, dtype=spent.dtype, device=spent.device)
    step = 2 * spent / slope * ((spent / target).sqrt() - 1)
    largest = torch.finfo(torch.float32).max
    better = torch.where(slope > 0, mu + step, 0.0)  # 0 if nothing is spent
    return better.nan_to_num(nan=0.0, posinf=largest).clamp(0, largest)


def budget_step(values: dict[str, Tensor]) -> None:
    """Take one Newton step in place: `mu` and `done` (1 or 0) from `spent`, `slope` and `nats`, all scalars.

    Example:
        >>> names = ("spent", "slope", "nats", "mu", "done")
        >>> values = dict(zip(names, torch.tensor([0.5, 1.0, 0.6, 0.0, 0.0]).double()))
        >>> budget_step(values)
        >>> values["mu"], values["done"]
        (tensor(0., dtype=torch.float64), tensor(1., dtype=torch.float64))
    """
    mu, done = _next((values["spent"], values["slope"]), values["nats"], values["mu"], values["done"] > 0)
    values["mu"].copy_(mu)
    values["done"].copy_(torch.where(done, 1.0, 0.0))


def _next(sums: Tensor | tuple[Tensor, Tensor], nats: Number, mu: Tensor, done: Tensor) -> tuple[Tensor, Tensor]:
    """Return the next mu, and whether it is the solution: it did not change, or too little to evaluate it again."""
    solved = done | budget_spent(sums, nats, mu)
    better = torch.where(solved, mu, budget_newton(sums, nats, mu))
    return better, solved | ((mu > 0) & ((better - mu).abs() <= MU_TOLERANCE * mu))


def budget_solved(spent: Callable[[Tensor, Tensor], Tensor], nats: Number, mu: Tensor) -> Tensor:
    """Return the smallest mu >= 0 that keeps the budget, by Newton's method; each run stops at its own solution.

    Args:
        spent: (mu, done) -> the sum of `spent_at` over all parameters; sums of runs that are done are not read.
        nats: the budget; one number, or one per run.
        mu: the start, such as the last step's solution: float64, 0-d or one per run.

    Example:
        >>> previous, d = torch.tensor([2.0, 1.0]), torch.tensor([3.0, 1.0])
        >>> mu = budget_solved(lambda mu, done: spent_at(previous, d, mu), 1.0, torch.zeros((), dtype=torch.float64))
        >>> round(float(mu), 3), round(float(spent_at(previous, d, mu)[0]), 3)
        (1.098, 0.995)
    """
    done = torch.zeros_like(mu, dtype=torch.bool)
    for _ in range(MAX_NEWTON_STEPS):
        mu, done = _next(spent(mu, done), nats, mu, done)
        if mu.device.type == "cpu" and bool(done.all()):  # a GPU would have to synchronise
            break
    return mu


@dataclass(frozen=True)
class Budget:
    """theta <- anchor + d / (1 + mu * F), with the smallest mu >= 0 that keeps sum(F * d^2) / 2 <= nats * tasks.

    F is the importance over past tasks, which must be a curvature. `EWC(decay=None, per_sample=True)` summed over tasks
    is the diagonal of the Fisher information. The sum then estimates by how many nats the losses on all past tasks
    together have risen since the last consolidation: at most `nats` per task in the mean. Nothing is pulled before the
    budget is spent. One number says how much may be forgotten; the strength of the pull follows from it in each step.

    Args:
        nats: how much of a past task may be forgotten in each new task; one number, or one per run.
        every: act in each `every`-th iteration of a task, and at its end. In between more than the budget may be spent:
            at most (sqrt(budget) + the sum of |step| since the last pull)^2, where |step|^2 = sum(F * step^2) / 2.
        measured: whether forgetting is measured wherever there is data of past tasks, as with a reference: `nats` then
            limits the divergence from the original model, or the rise of a loss that was given, on held-out data. If
            not, and without data, the sum above is all that is known, and limited.
        distil: whether the gradient of that divergence, on the other part of the data, is added to the task's.
            True does so in every step, on a whole batch, which about doubles the cost of a step. None does so on parts
            of batches, for a quarter to a half of a step, and mostly a fifth for adapters
            (`mooring.reference.pass_cost`). Inputs of floating-point numbers are also mixed with each other;
            "unmixed" is as None without that. It has no effect on a budget that is not measured.
        average: whether the end of a task takes an average of the trained parameters over about the last 50 steps, if
            that keeps the budget or has forgotten no more than the last ones (`mooring.hold.finish`). None does so
            in tasks of more than about 420 steps. It has no effect on a budget that is not measured.

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
        >>> round(moor.pull_energy(), 5)  # at most 0.01, and at least 99% of it
        0.00995
    """

    nats: Number
    every: int = 1
    measured: bool = True
    distil: bool | Literal["unmixed"] | None = None
    average: bool | None = None

    def __post_init__(self) -> None:
        check_numbers("nats", self.nats, 0)
        check_whole("every", self.every, 1)
        for name, others in (("measured", ()), ("distil", (None, "unmixed")), ("average", (None,))):
            switch = getattr(self, name)
            if not (isinstance(switch, bool) or switch in others):
                names = "True, False or 'unmixed'" if "unmixed" in others else "True or False"
                raise MooringError(f"{name}={switch!r} is not allowed: give {names}")

    def allowed(self, task: int) -> Number:
        """Return what all past tasks together may spend in a task; the first task after a consolidation is 1.

        Example:
            >>> Budget(0.25).allowed(task=3)
            0.75
        """
        return self.nats * task

    def rate(self, previous: Tensor, mu: Number) -> Tensor:
        """Return the rate of the return to the anchor: mu * F / (1 + mu * F)."""
        return proximal_rate(previous, mu, 1.0)
