"""Calibration: measures on data by what factor the loss rises faster than a budget's estimate."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mooring.adapters.product_factors import ProductFactors
from mooring.backends.budget_solver import BudgetSolver
from mooring.backends.budget_terms import budget_terms
from mooring.backends.eager import autocast_disabled
from mooring.errors import MooringError, NonFiniteError, UnheldWarning, warn
from mooring.importance.kronecker_factors import KroneckerFactors
from mooring.pulls.budget import Budget
from mooring.reference.batches import Data, Loss, Outputs, iter_batches, scalar_loss
from mooring.reference.estimation import NO_DEPENDENCE, NOT_FINITE
from mooring.reference.preserve_model_state import preserve_model_state
from mooring.reference.progress import progress
from mooring.reference.reference_labels import prepare_labels
from mooring.state.mooring_state import MooringState, ParameterState, layer_scales
from mooring.state.offload import AnchorOffload
from mooring.state.selection import layer_of

DIRECTIONS = 4
"""Number of probe directions; each is used with its opposite."""

MIN_FACTOR, MAX_FACTOR, BISECTIONS = 1e-2, 1e6, 12
"""The interval that the factor is searched in, and the number of bisections."""


def solve_factor(rise: Callable[[float], float], nats: float, *, show: bool | None = False) -> float:
    """Return the factor nats / q, where q is the estimate at which the loss truly rises by nats.

    It is found by bisection in log q between 0.01 and a million, for a rise that grows with q. Beyond, the data does
    not say what the factor is, and a warning says so. The result is then the safer value: if the loss rises too much
    even with a factor of a million, a million; if it hardly rises even with 0.01, 1, which trusts the estimate.

    Args:
        rise: the true rise of the loss at the displacement whose estimate is q.
        nats: the budget.
        show: whether to show a progress bar; None shows it only on a terminal.

    Example:
        >>> round(solve_factor(lambda q: 2 * q, 0.1), 1), round(solve_factor(lambda q: q + 10 * q**2, 0.1), 1)
        (2.0, 1.6)
    """
    low, high = math.log(MIN_FACTOR), math.log(MAX_FACTOR)
    for _ in progress(range(BISECTIONS), "calibrating the budget", BISECTIONS, show=show):
        middle = (low + high) / 2
        low, high = (middle, high) if rise(nats / math.exp(middle)) > nats else (low, middle)
    if high == math.log(MAX_FACTOR):
        _warn_of_bound(f"rises by more than the budget of {nats:g} nats even where its estimate is a millionth of it")
        return MAX_FACTOR
    if low == math.log(MIN_FACTOR):
        _warn_of_bound(f"does not rise by the budget of {nats:g} nats even where its estimate is 100 times that")
        return 1.0
    return math.exp((low + high) / 2)


def _warn_of_bound(finding: str) -> None:
    warn(
        f"the budget could not be calibrated: the loss on the data {finding}, so it may not be kept: "
        "check that the data and the loss are those the model was trained with (labels of a language model are "
        "shifted), and moor.coverage()",
        UnheldWarning,
    )


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
    """Return the factor of a task's curvature at which the measured loss rises by exactly the budget.

    The mean over probes v of loss(pulled(theta + v, q)) - loss(theta) = nats is solved for q; the factor is nats / q.
    pulled(., q) is the pull of `Budget` with q nats allowed and the curvature of this task alone. The rise is measured
    where the budget is spent, because along the path of training the loss departs from its quadratic approximation.

    A probe v is the gradient of the sum of the batches' losses with random signs: a direction in which outputs on this
    task's data change. Its length is the distance that the parameters moved in this task. Each probe is used with
    its opposite, so that first-order terms cancel.

    Parameters, buffers, gradients, modes and random states are restored.

    Args:
        states: the states of the moored parameters, at the end of a task.
        budget: the budget.
        data: batches, best of held-out data. All are kept in memory, and all have the same weight.
        loss: the mean loss on a batch; None is `default_loss`, with labels sampled from the model if there are none.
        batches: the largest number of batches to read; None reads all.
        outputs: takes what the model returns and gives the tensor of its outputs.
        show: whether to show a progress bar; None shows it only on a terminal.
    """
    nats = float(budget.promised(states.tasks + 1))
    with preserve_model_state(states.model, moves=True):
        read = list(iter_batches(data, states.model, batches))
        if not read:
            raise MooringError("data has no batches: give some of the task's data, best held out")
        if loss is None:
            read = [prepare_labels(states.model, batch, seed, outputs) for seed, batch in enumerate(read)]
        held = _states_of_this_task(states)
        if not held:
            raise MooringError("no step was taken since the last consolidation: calibrate at the end of a task")
        if not nats:
            return 1.0  # with nothing to spend, the factor has no effect
        losses = _Losses(states.model, read, loss, outputs)
        distance = _norm(m.parameter.to(m.compute_dtype) - m.device_anchor for m in _trained(states))
        probes = _probes(losses, held, distance, states.tasks)
        undisplaced = losses.mean()

        def rise(q: float) -> float:
            allowed = dataclasses.replace(budget, nats=q, growth=1.0)
            displaced = []
            for probe in probes:
                _displace(held, probe, allowed)
                displaced.append(losses.mean())
            return math.fsum(displaced) / len(probes) - undisplaced

        return solve_factor(rise, nats, show=show)


class _Losses:
    """The losses of a model on batches."""

    def __init__(self, model: nn.Module, batches: Sequence[Any], loss: Loss | None, outputs: Outputs | None) -> None:
        self.batches, self.loss_on = batches, partial(scalar_loss, loss, model, outputs=outputs)
        if not all(math.isfinite(float(self.loss_on(batch))) for batch in batches):
            raise NonFiniteError(NOT_FINITE)

    @torch.no_grad()
    def mean(self) -> float:
        """Return the mean loss; infinity if it overflows, as it may far from the anchor."""
        mean = math.fsum(float(self.loss_on(batch)) for batch in self.batches) / len(self.batches)
        return mean if math.isfinite(mean) else math.inf

    def gradient(self, signs: Sequence[float], parameters: list[Tensor]) -> list[Tensor]:
        """Return the gradient of the sum of sign * loss over the batches."""
        total = [torch.zeros_like(p) for p in parameters]
        for sign, batch in zip(signs, self.batches, strict=True):
            with torch.enable_grad():
                value = self.loss_on(batch)
                if not value.requires_grad:
                    raise MooringError(NO_DEPENDENCE)
                gradients = torch.autograd.grad(sign * value, parameters, allow_unused=True)
            for part, g in zip(total, gradients, strict=True):
                if g is not None:
                    part.add_(g)
        return total


def _trained(states: MooringState) -> list[ParameterState]:
    return [m for m in states.records.values() if m.count and m.parameter.requires_grad]


@autocast_disabled()
def _states_of_this_task(states: MooringState) -> list[ParameterState]:
    """Return states anchored at the present parameters, with the importance of this task alone as the previous one."""
    held, scales = [], layer_scales(states.records.values(), states.importance)
    for m in _trained(states):
        anchor = m.parameter.detach().to(m.compute_dtype, copy=True)
        own = dataclasses.replace(m, anchor=anchor, previous=None, factors=None)
        if m.is_product_input:
            pass
        elif m.factors is None or m.has_scores:
            own.previous = m.importance_state["current"].to(m.compute_dtype) * scales.get(layer_of(m.name), 1.0)
        elif isinstance(m.factors, ProductFactors):
            own.factors = m.factors.of_this_task() if m.factors.count else None
        elif m.factors.count:
            a, g = m.factors.inputs / m.factors.count, m.factors.outputs / m.factors.count
            own.factors = KroneckerFactors(m.factors.inputs, m.factors.outputs, a, g, tasks=1)
            own.factors.update_eigenbasis()
        held.append(own)
    states.join_products({own.parameter: own for own in held})
    return held


def _probes(losses: _Losses, held: Sequence[ParameterState], length: float, seed: int) -> list[list[Tensor]]:
    """Return displacements, each with its opposite; random ones if the gradient is zero."""
    generator, probes = torch.Generator().manual_seed(seed), []
    for _ in range(DIRECTIONS):
        signs = (torch.randint(2, (len(losses.batches),), generator=generator) * 2.0 - 1).tolist()
        gradient = losses.gradient(signs, [m.parameter for m in held])
        v = [g.to(m.compute_dtype) for g, m in zip(gradient, held, strict=True)]
        if not _norm(v):
            v = [torch.randn(m.anchor.shape, generator=generator).to(m.anchor) for m in held]
        scale = (length or 1.0) / _norm(v)
        probes += [[scale * t for t in v], [-scale * t for t in v]]
    return probes


def _norm(tensors: Iterable[Tensor]) -> float:
    return math.sqrt(math.fsum(float(t.square().sum()) for t in tensors))


@torch.no_grad()
@autocast_disabled()
def _displace(held: Sequence[ParameterState], probe: Sequence[Tensor], budget: Budget) -> None:
    """Displace the parameters by a probe that is pulled back or stretched until the budget is spent."""
    for m, v in zip(held, probe, strict=True):
        m.parameter.copy_(m.anchor + v)
    spent = math.fsum(float(term.energy()) for term in budget_terms(held))
    if 0 < spent < budget.nats:
        for m, v in zip(held, probe, strict=True):
            m.parameter.copy_(m.anchor + v * math.sqrt(budget.nats / spent))
    BudgetSolver(budget, AnchorOffload(1), reused=False).apply_pull(held, {m.parameter for m in held}, 1)
