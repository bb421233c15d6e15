"""Calibration: by what factor the loss rises faster than a budget's estimate says, measured while data is at hand."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mooring.backends.budget_solver import BudgetSolver, budget_term
from mooring.distributed.collectives import world_size
from mooring.errors import MooringError, NonFiniteError
from mooring.importance.kronecker_factors import Factor
from mooring.pulls.budget import Budget
from mooring.reference.batches import Data, Outputs, batches_of, labelled
from mooring.reference.losses import Loss, default_loss, scalar_loss
from mooring.reference.preserve_model_state import preserve_model_state
from mooring.reference.progress import progress
from mooring.state.mooring_state import MooringState, ParameterState
from mooring.state.selection import layer_of

__all__ = ["calibration_factor", "solved_factor"]

DIRECTIONS = 4
"""Directions to probe in, each with its opposite."""

LEAST, MOST, HALVINGS = 1e-2, 1e6, 12
"""Between which factors the answer is looked for, and how often the interval is halved."""


def solved_factor(rise: Callable[[float], float], nats: float, *, show: bool | None = False) -> float:
    """The factor that makes an estimate true at a budget: nats / q, with q the estimate at which the rise is nats.

    By bisection in log q, for a rise that grows with q; from 0.01 to a million.

    Args:
        rise: the true rise of the loss where the estimate is q.
        nats: the budget.
        show: a progress bar; None on a terminal only.

    Example:
        >>> round(solved_factor(lambda q: 2 * q, 0.1), 1), round(solved_factor(lambda q: q + 10 * q**2, 0.1), 1)
        (2.0, 1.6)
    """
    low, high = math.log(LEAST), math.log(MOST)
    for _ in progress(range(HALVINGS), "calibrating the budget", HALVINGS, show=show):
        middle = (low + high) / 2
        low, high = (middle, high) if rise(nats / math.exp(middle)) > nats else (low, middle)
    return math.exp((low + high) / 2)


def calibration_factor(
    states: MooringState,
    budget: Budget,
    data: Data,
    *,
    loss: Loss | None = None,
    batches: int | None = None,
    outputs: Outputs | None = None,
    show: bool | None = False,
) -> float:
    """What a task's own curvature is to be multiplied by, so that its loss rises by the budget where the budget ends.

    The mean over probes of loss(pulled(theta + v, q)) - loss(theta) = nats is solved for q; the factor is nats / q.
    pulled(., q) is what `Budget` does where q nats are allowed, with the curvature of this task alone. It is measured
    where the budget ends, not close by: along the way that training goes, the loss does not follow the quadratic.

    A probe v is a gradient, plus and minus, of the batches' losses added with random signs, as long as the way
    that the task went: directions in which outputs on this task's data change. Each with its opposite, what is
    left is not to first order.

    Everything is put back: parameters, buffers, gradients, modes and random states.

    Args:
        states: the records of the moored parameters, at the end of a task.
        budget: what may be spent.
        data: batches, best of held-out data; all are kept in memory meanwhile, and each counts the same.
        loss: the mean loss of a model on a batch; None is `default_loss`, with labels that the model draws where there
            are none.
        batches: how many at most; None is all of them.
        outputs: from what the model returns to the tensor of its outputs.
        show: a progress bar; None on a terminal only.
    """
    nats = float(budget.promised(states.tasks + 1))
    if world_size() > 1:
        raise MooringError(
            "consolidate(data=...) would measure the data of one rank only: under torch.distributed leave data out"
        )
    with preserve_model_state(states.model, moves=True):
        found = list(batches_of(data, states.model, batches))
        if not found:
            raise MooringError("data has no batches: give some of the task's data, best held out")
        if loss is None:
            found = [labelled(states.model, batch, number, outputs) for number, batch in enumerate(found)]
        held = _held(states)
        if not held:
            raise MooringError("nothing was learned since the last consolidation: calibrate at the end of a task")
        if not nats:
            return 1.0  # nothing is spent, whatever it is worth
        losses = _Losses(states.model, found, loss or default_loss(outputs))
        went = math.sqrt(math.fsum(float((m.parameter.to(m.wide) - m.near).square().sum()) for m in _moved(states)))
        probes = _probes(losses, held, went, states.tasks)
        begin = losses.mean()

        def rise(q: float) -> float:
            found = [
                _displaced(held, probe, dataclasses.replace(budget, nats=q, growth=1.0), losses) for probe in probes
            ]
            return math.fsum(found) / len(found) - begin

        return solved_factor(rise, nats, show=show)


class _Losses:
    """The losses of a model on some batches."""

    def __init__(self, model: nn.Module, batches: Sequence[Any], loss: Loss) -> None:
        self.model, self.batches, self.loss = model, batches, loss
        if not all(math.isfinite(float(self.of(batch))) for batch in batches):
            raise NonFiniteError("the loss on data is not finite; nothing was changed: look at the data and the loss")

    def of(self, batch: Any) -> Tensor:
        return scalar_loss(self.loss, self.model, batch)

    @torch.no_grad()
    def mean(self) -> float:
        """Infinity where the model was displaced so far that there is none."""
        found = math.fsum(float(self.of(batch)) for batch in self.batches) / len(self.batches)
        return found if math.isfinite(found) else math.inf

    def gradient(self, signs: Sequence[float], parameters: list[Tensor]) -> list[Tensor]:
        """Of the sum of all losses, each with its sign."""
        total = [torch.zeros_like(p) for p in parameters]
        for sign, batch in zip(signs, self.batches, strict=True):
            with torch.enable_grad():
                found = self.of(batch)
                if not found.requires_grad:
                    raise MooringError(
                        "the loss on data depends on no moored parameter: compute it with the model given"
                    )
                gradients = torch.autograd.grad(sign * found, parameters, allow_unused=True)
            for sum_, g in zip(total, gradients, strict=True):
                if g is not None:
                    sum_.add_(g)
        return total


def _moved(states: MooringState) -> list[ParameterState]:
    return [m for m in states.records.values() if m.count and m.parameter.requires_grad]


def _held(states: MooringState) -> list[ParameterState]:
    """Records that are anchored here, and whose past is this task alone."""
    held, factors = [], states.factors()
    for m in _moved(states):
        own = dataclasses.replace(m, anchor=m.parameter.detach().to(m.wide, copy=True), previous=None, factor=None)
        if m.factor is None:
            own.previous = m.state["current"].to(m.wide) * factors.get(layer_of(m.name), 1.0)
        elif m.factor.looks:
            a, g = m.factor.inputs / m.factor.looks, m.factor.outputs / m.factor.looks
            own.factor = Factor(m.factor.inputs, m.factor.outputs, a, g, tasks=1)
            own.factor.turn()
        held.append(own)
    return held


def _probes(losses: _Losses, held: Sequence[ParameterState], length: float, seed: int) -> list[list[Tensor]]:
    """Displacements, each with its opposite; at random where there is no gradient."""
    generator, found = torch.Generator().manual_seed(seed), []
    for _ in range(DIRECTIONS):
        signs = (torch.randint(2, (len(losses.batches),), generator=generator) * 2.0 - 1).tolist()
        v = [g.to(m.wide) for g, m in zip(losses.gradient(signs, [m.parameter for m in held]), held, strict=True)]
        if not _norm(v):
            v = [torch.randn(m.anchor.shape, generator=generator).to(m.anchor) for m in held]
        scale = (length or 1.0) / _norm(v)
        found += [[scale * t for t in v], [-scale * t for t in v]]
    return found


def _norm(tensors: Iterable[Tensor]) -> float:
    return math.sqrt(math.fsum(float(t.square().sum()) for t in tensors))


@torch.no_grad()
def _displaced(held: Sequence[ParameterState], probe: Sequence[Tensor], budget: Budget, losses: _Losses) -> float:
    """The loss at a displacement, pulled back until the budget is kept, or stretched until it is spent."""
    for m, v in zip(held, probe, strict=True):
        m.parameter.copy_(m.anchor + v)
    spent = math.fsum(float(line.spent(0.0)[0]) for m in held if (line := budget_term(m)) is not None)
    if 0 < spent < budget.nats:
        for m, v in zip(held, probe, strict=True):
            m.parameter.copy_(m.anchor + v * math.sqrt(budget.nats / spent))
    BudgetSolver(budget).spend(held, {m.parameter for m in held}, 1)
    return losses.mean()
