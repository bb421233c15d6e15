"""Calibration: measures on data by what factor the loss rises faster than a budget's estimate."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mooring.backends.budget_solver import BudgetSolver
from mooring.backends.eager import autocast_disabled
from mooring.distributed.dtensor import sharded
from mooring.errors import MooringError, NonFiniteError, UnheldWarning, warn
from mooring.pulls.budget import Budget
from mooring.reference.batches import Data, Loss, Outputs, iter_batches, scalar_loss
from mooring.reference.estimation import NO_DEPENDENCE, NOT_FINITE
from mooring.reference.preserve_model_state import preserve_model_state, preserve_other_gradients
from mooring.reference.progress import progress
from mooring.reference.reference_labels import prepare_labels
from mooring.state.mooring_state import MooringState, ParameterState, layer_scales
from mooring.state.offload import AnchorOffload
from mooring.state.selection import layer_of

DIRECTIONS = 2
"""Number of probe directions; each is used with its opposite."""

MIN_FACTOR, MAX_FACTOR = 1e-2, 1e6
"""The interval that the factor is searched in."""

MAX_EVALUATIONS = 12
"""Upper limit of the measurements of a rise along one direction; three or four are usual."""

RISE_TOLERANCE = 0.03
"""The relative distance of a measured rise from the budget at which the search ends, with one more correction."""

USUAL_EVALUATIONS = 4
"""The number of measurements along one direction that the progress bar expects."""


def solve_factor(rise: Callable[[float], float], nats: float, *, start: float = 1.0) -> float:
    """Return the factor nats / q, where q is the estimate at which the loss truly rises by nats.

    It is found by the secant method in log q and log rise, for a rise that grows with q, within a bracket that halves
    where the secant leaves it. The factor lies between 0.01 and a million; at either bound the data does not say what
    it is.

    Args:
        rise: the true rise of the loss at the displacement whose estimate is q.
        nats: the budget.
        start: a first guess of the factor.

    Example:
        >>> round(solve_factor(lambda q: 2 * q, 0.1), 1), round(solve_factor(lambda q: q + 10 * q**2, 0.1), 1)
        (2.0, 1.6)
    """
    low, high = math.log(MIN_FACTOR), math.log(MAX_FACTOR)
    at, slope = min(max(math.log(start), low), high), 1.0  # log rise falls by about 1 for each 1 of log factor
    measured: tuple[float, float] | None = None
    for _ in range(MAX_EVALUATIONS):
        excess = _log_ratio(rise(nats / math.exp(at)), nats)
        if excess > 0 and at == math.log(MAX_FACTOR):
            return MAX_FACTOR
        if excess <= 0 and at == math.log(MIN_FACTOR):
            return MIN_FACTOR
        if measured is not None and math.isfinite(excess) and math.isfinite(measured[1]) and at != measured[0]:
            slope = min(max((measured[1] - excess) / (at - measured[0]), 0.25), 4.0)
        low, high, measured = (at, high, (at, excess)) if excess > 0 else (low, at, (at, excess))
        following = at + excess / slope
        if abs(excess) <= RISE_TOLERANCE:
            return math.exp(min(max(following, low), high))
        at = min(max(following, math.log(MIN_FACTOR)), math.log(MAX_FACTOR))
        if not low < at < high and at not in (math.log(MIN_FACTOR), math.log(MAX_FACTOR)):
            at = (low + high) / 2
    return math.exp((low + high) / 2)


def _log_ratio(rise: float, nats: float) -> float:
    """Return log(rise / nats), infinite for a rise that is not positive or not finite."""
    if rise <= 0:
        return -math.inf
    return math.log(rise / nats) if math.isfinite(rise) else math.inf


def checked_factor(factor: float, nats: float) -> float:
    """Return a factor; at a bound the safer value, with a warning.

    If the loss rises too much even with a factor of a million, that is a million; if it hardly rises even with 0.01,
    it is 1, which trusts the estimate.

    Example:
        >>> checked_factor(2.5, 0.1)
        2.5
    """
    if factor >= MAX_FACTOR / 2:
        _warn_of_bound(f"rises by more than the budget of {nats:g} nats even where its estimate is a millionth of it")
        return MAX_FACTOR
    if factor <= MIN_FACTOR:
        _warn_of_bound(f"does not rise by the budget of {nats:g} nats even where its estimate is 100 times that")
        return 1.0
    return factor


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

    Along each probe direction v, the mean of loss(pulled(theta + v, q)) and loss(pulled(theta - v, q)), less
    loss(theta), is to be nats: that is solved for q. First-order terms cancel. The factor is the mean of nats / q over
    directions. pulled(., q) is the pull of `Budget` with q nats allowed and the curvature of this task alone. The rise
    is measured where the budget is spent, because along the path of training the loss departs from its quadratic
    approximation.

    A direction is the gradient of the sum of some batches' losses with random signs, along which outputs on this
    task's data change. Its length is the distance that the parameters moved in this task. With four batches or more,
    each direction is made from a half of them and measured on another half, which has a half of its own in common with
    the first. Only one direction is in memory at a time, in the place of the gradient.

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
    with preserve_model_state(states.model, moves=True, moved=()):
        read = list(iter_batches(data, states.model, batches))
        if not read:
            raise MooringError("data has no batches: give some of the task's data, best held out")
        if loss is None:
            read = [prepare_labels(states.model, batch, seed, outputs) for seed, batch in enumerate(read)]
        if not _trained(states):
            raise MooringError("no step was taken since the last consolidation: calibrate at the end of a task")
        if not nats:
            return 1.0  # with nothing to spend, the factor has no effect
        with _Calibration(states, budget, _Losses(states.model, read, loss, outputs, show)) as calibration:
            return checked_factor(calibration.factor(nats), nats)


class _Losses:
    """The losses of a model on batches, with a progress bar over all passes."""

    def __init__(
        self, model: nn.Module, batches: Sequence[Any], loss: Loss | None, outputs: Outputs | None, show: bool | None
    ) -> None:
        self.model, self.batches = model, batches
        self.loss_on = partial(scalar_loss, loss, model, outputs=outputs)
        evaluations = sum(len(measured) for _, measured in split_batches(len(batches))) * 2 * USUAL_EVALUATIONS
        total = 2 * len(batches) + evaluations
        self.passes = progress(range(8 * total), "calibrating the budget", total, show=show)
        self.undisplaced = [self.at(index) for index in range(len(batches))]
        if not all(map(math.isfinite, self.undisplaced)):
            raise NonFiniteError(NOT_FINITE)

    @torch.no_grad()
    def at(self, index: int) -> float:
        """Return the loss on a batch; infinity if it overflows, as it may far from the anchor."""
        next(self.passes, None)
        value = float(self.loss_on(self.batches[index]))
        return value if math.isfinite(value) else math.inf

    def rise(self, indices: Sequence[int]) -> float:
        """Return the mean rise of the loss on some batches since the parameters were where they began."""
        return math.fsum(self.at(index) - self.undisplaced[index] for index in indices) / len(indices)

    def gradient(self, signs: Mapping[int, float], parameters: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradient of the sum of sign * loss over batches; it is accumulated layer by layer."""
        kept = [(p, p.grad) for p in self.model.parameters()]
        try:
            for p, _ in kept:
                p.grad = None
            for index, sign in signs.items():
                next(self.passes, None)
                with torch.enable_grad():
                    value = sign * self.loss_on(self.batches[index])
                    if not value.requires_grad:
                        raise MooringError(NO_DEPENDENCE)
                    with preserve_other_gradients(value, self.model):
                        value.backward()  # type: ignore[no-untyped-call]
            return [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        finally:
            for p, gradient in kept:
                p.grad = gradient


def split_batches(count: int) -> list[tuple[list[int], list[int]]]:
    """Return the batches that each direction is made from, and those that it is measured on.

    Example:
        >>> split_batches(8)
        [([0, 2, 4, 6], [0, 1, 4, 5]), ([1, 3, 5, 7], [2, 3, 6, 7])]
        >>> split_batches(2)
        [([0, 1], [0, 1]), ([0, 1], [0, 1])]
    """
    every = range(count)
    if count < 2 * DIRECTIONS:
        return [(list(every), list(every)) for _ in range(DIRECTIONS)]
    return [
        ([i for i in every if i % DIRECTIONS == direction], [i for i in every if i // 2 % DIRECTIONS == direction])
        for direction in range(DIRECTIONS)
    ]


class _Calibration:
    """States anchored at the present parameters, which are displaced along one direction after the other.

    Args:
        states: the states of the moored parameters.
        budget: the budget.
        losses: the losses on the data.
    """

    def __init__(self, states: MooringState, budget: Budget, losses: _Losses) -> None:
        self.losses, self.seed = losses, states.tasks
        self.distance = _norm(m.parameter.to(m.compute_dtype) - m.device_anchor for m in _trained(states))
        self.held = _states_of_this_task(states)
        self.parameters = [m.parameter for m in self.held]
        self.budget = dataclasses.replace(budget, growth=1.0)
        self.solver = BudgetSolver(self.budget, AnchorOffload(1))

    def __enter__(self) -> "_Calibration":
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()

    def factor(self, nats: float) -> float:
        """Return the mean over directions of the factor at which the loss rises by nats; each search starts there."""
        generator, factors = torch.Generator().manual_seed(self.seed), list[float]()
        for sources, measured in split_batches(len(self.losses.batches)):
            v = self._direction(sources, generator)

            def rise(q: float, v: list[Tensor] = v, indices: list[int] = measured) -> float:
                rises = []
                for sign in (1.0, -1.0):
                    self._displace(v, sign, q)
                    rises.append(self.losses.rise(indices))
                return math.fsum(rises) / 2

            factors.append(solve_factor(rise, nats, start=factors[-1] if factors else 1.0))
            self._restore()
        return math.fsum(factors) / len(factors)

    def _direction(self, sources: Sequence[int], generator: torch.Generator) -> list[Tensor]:
        """Return a direction of the length that the parameters moved; a random one if the gradient is zero."""
        signs = (torch.randint(2, (len(sources),), generator=generator) * 2.0 - 1).tolist()
        v = self.losses.gradient(dict(zip(sources, signs, strict=True)), self.parameters)
        norm = _norm(g.to(m.compute_dtype) for g, m in zip(v, self.held, strict=True))
        if not norm:
            v = [torch.randn(m.anchor.shape, generator=generator).to(m.anchor) for m in self.held]
            norm = _norm(v)
        self.scale = (self.distance or 1.0) / norm
        return v

    @torch.no_grad()
    @autocast_disabled()
    def _displace(self, v: Sequence[Tensor], sign: float, nats: float) -> None:
        """Displace the parameters by a direction that is pulled back or stretched until the budget is spent."""
        self._move(v, sign * self.scale)
        spent = self.solver.energy(self.held)
        if 0 < spent < nats:
            self._move(v, sign * self.scale * math.sqrt(nats / spent))
        self.solver.budget, self.solver.mu = dataclasses.replace(self.budget, nats=nats), {}
        self.solver.apply_pull(self.held, self.parameters, 1)

    def _move(self, v: Sequence[Tensor], by: float) -> None:
        for m, direction in zip(self.held, v, strict=True):
            m.parameter.copy_(m.anchor.to(m.compute_dtype) + by * direction.to(m.compute_dtype))

    @torch.no_grad()
    def _restore(self) -> None:
        for m in self.held:
            m.parameter.copy_(m.anchor)


def _trained(states: MooringState) -> list[ParameterState]:
    return [m for m in states.records.values() if m.count and m.parameter.requires_grad]


def _present_values(m: ParameterState) -> Tensor:
    """Return the values of a parameter: its anchor if it did not move since, else a copy."""
    theta = m.parameter.detach()
    same = m.anchor.dtype == theta.dtype and m.anchor.device == theta.device and m.anchor.shape == theta.shape
    return m.anchor if same and not sharded(theta) and torch.equal(m.anchor, theta) else theta.clone()


@autocast_disabled()
def _states_of_this_task(states: MooringState) -> list[ParameterState]:
    """Return states anchored at the present parameters, with the importance of this task alone as the previous one."""
    held, scales = [], layer_scales(states.records.values(), states.importance)
    for m in _trained(states):
        own = dataclasses.replace(m, anchor=_present_values(m), previous=None, factors=None)
        if m.is_product_input:
            pass  # its B has the factors of both
        elif m.factors is None or m.has_scores:
            own.previous = m.importance_state["current"].to(m.compute_dtype)
            if (scale := scales.get(layer_of(m.name))) is not None:
                own.previous = own.previous * scale
        else:
            own.factors = m.factors.of_this_task() if m.factors.count else dataclasses.replace(m.factors, basis=None)
        held.append(own)
    states.join_products({own.parameter: own for own in held})
    return held


def _norm(tensors: Iterable[Tensor]) -> float:
    return math.sqrt(math.fsum(float(t.square().sum()) for t in tensors))
