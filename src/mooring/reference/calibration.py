"""Calibration: measures on data by what factor the loss rises faster than a budget's estimate."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mooring.backends.budget_solver import BudgetSolver
from mooring.backends.eager import autocast_disabled
from mooring.curvature.kronecker_factors import complete_eigenbases
from mooring.distributed.dtensor import sharded
from mooring.errors import MooringError, NonFiniteError, UnheldWarning, warn
from mooring.reference.batches import Data, Loss, Outputs, iter_batches, scalar_loss
from mooring.reference.estimation import NO_DEPENDENCE, NOT_FINITE
from mooring.reference.preserve_model_state import preserve_model_state, preserve_other_gradients
from mooring.reference.probes import DIRECTIONS, Probes, add_gradients, direction_dtype, random_signs
from mooring.reference.progress import progress
from mooring.reference.reference_labels import prepare_labels
from mooring.rules.budget import UNSPENT_TOLERANCE, Budget
from mooring.state.consolidation import layer_scales
from mooring.state.mooring_state import MooringState
from mooring.state.offload import AnchorOffload
from mooring.state.parameter_state import ParameterState
from mooring.state.selection import layer_of

MIN_PAIRS = 8
"""Pairs of a batch and a direction along which its loss is measured; with more batches, each along one direction."""

MOVED_AT_ONCE = 1 << 26
"""Weights of the parameters that are displaced at once; there is a copy of so many."""

MIN_FACTOR, MAX_FACTOR = 1e-2, 1e6
"""The interval that the factor is searched in."""

MAX_EVALUATIONS = 12
"""Upper limit of the evaluations of a rise in one search."""

FIRST_TOLERANCE, TOLERANCE = 0.25, 0.15
"""The distance of log(rise / budget) from 0 that ends the first search, and the second, with one more secant step."""

USUAL_EVALUATIONS = 4
"""The number of evaluations in the first search that the progress bar expects; the second one has one or two."""


@dataclass
class FactorSearch:
    """The search for the factor nats / q, where q is the estimate at which the loss truly rises by nats.

    It is the secant method in log q and log rise, for a rise that grows with q, within a bracket that halves where the
    secant leaves it. The factor lies between 0.01 and a million; at either bound the data does not say what it is.

    Attributes:
        nats: the budget.
        factor: a first guess of the factor, and then the result.
        slope: the same for the slope of log rise over log q.

    Example:
        >>> search = FactorSearch(0.1)
        >>> round(search.solve(lambda q: q + 10 * q**2, tolerance=0.03), 1)
        1.6
    """

    nats: float
    factor: float = 1.0
    slope: float = 1.0

    def solve(self, rise: Callable[[float], float], tolerance: float) -> float:
        """Return the factor, by a last secant step from where log(rise / nats) is within a tolerance of 0.

        Args:
            rise: the true rise of the loss at the displacement whose estimate is q.
            tolerance: the tolerance.
        """
        low, high = bounds = math.log(MIN_FACTOR), math.log(MAX_FACTOR)
        at = min(max(math.log(self.factor), low), high)
        measured: tuple[float, float] | None = None
        for _ in range(MAX_EVALUATIONS):
            excess = _log_ratio(rise(self.nats / math.exp(at)), self.nats)
            if at == bounds[excess > 0]:
                break
            if measured is not None and math.isfinite(excess) and math.isfinite(measured[1]) and at != measured[0]:
                self.slope = min(max((measured[1] - excess) / (at - measured[0]), 0.25), 4.0)
            measured = at, excess
            low, high = (at, high) if excess > 0 else (low, at)
            at = min(max(at + excess / self.slope, bounds[0]), bounds[1])
            if abs(excess) <= tolerance:
                at = min(max(at, low), high)
                break
            if not low < at < high and at not in bounds:
                at = (low + high) / 2
        self.factor = {bounds[0]: MIN_FACTOR, bounds[1]: MAX_FACTOR}.get(at, math.exp(at))
        return self.factor


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
    probes: Probes | None = None,
) -> float:
    """Return the factor of a task's curvature at which the measured loss rises by exactly the budget.

    The mean over probes v of loss(pulled(theta + v, q)) - loss(theta) = nats is solved for q; the factor is nats / q.
    Each batch is measured along one probe direction, or along several if there are few batches. pulled(., q) is the
    pull of `Budget` with q nats allowed and the curvature of this task alone. The rise is measured where the budget is
    spent, because along the path of training the loss departs from its quadratic approximation.

    A probe v is the gradient of the sum of the batches' losses with random signs: a direction in which outputs on this
    task's data change. An estimate of importance has that from all its batches, in `probes`. If all probes do not fit
    into memory, each is the gradient on one batch, which is computed when it is needed, and the others are measured
    along it. The length of a probe is the distance that the parameters moved in this task. Each is used with its
    opposite, so that first-order terms cancel.

    Parameters, buffers, gradients, modes and random states are restored.

    Args:
        states: the states of the moored parameters, at the end of a task.
        budget: the budget.
        data: batches, best of held-out data. All are kept in memory, and all have the same weight.
        loss: the mean loss on a batch; None is `default_loss`, with labels sampled from the model if there are none.
        batches: the largest number of batches to read; None reads all.
        outputs: takes what the model returns and gives the tensor of its outputs.
        show: whether to show a progress bar; None shows it only on a terminal.
        probes: what an estimate of importance, of which `data` are the first batches, collected.
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
        losses = _Losses(states.model, read, loss, outputs, show, probes.losses if probes else ())
        with _Calibration(states, budget, losses, probes) as calibration:
            return checked_factor(calibration.factor(nats), nats)


class _Losses:
    """The losses of a model on batches, with a progress bar over all passes; `known` are those before any pass."""

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Any],
        loss: Loss | None,
        outputs: Outputs | None,
        show: bool | None,
        known: Sequence[float],
    ) -> None:
        self.model, self.batches = model, batches
        self.loss_on = partial(scalar_loss, loss, model, outputs=outputs)
        total = (0 if known else len(batches)) + 2 * USUAL_EVALUATIONS + 2 * max(len(batches), MIN_PAIRS)
        self.passes = progress(range(8 * total), "calibrating the budget", total, show=show)
        self.undisplaced: dict[int, Tensor | float] = dict(enumerate(known))

    @torch.no_grad()
    def rise(self, index: int) -> Tensor:
        """Return the rise of the loss on a batch since it was undisplaced, without waiting for it."""
        next(self.passes, None)
        return self.loss_on(self.batches[index]).double() - self.undisplaced[index]

    @torch.no_grad()
    def measure_undisplaced(self) -> None:
        """Compute the losses that are not known yet, where the parameters are."""
        for index, batch in enumerate(self.batches):
            if index not in self.undisplaced:
                next(self.passes, None)
                self.undisplaced[index] = self.loss_on(batch).double()

    def gradient_of(self, index: int, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradient of the loss on one batch."""
        with self._own_gradients():
            self._backward(index)
            return [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]

    def signed_gradients(
        self, seed: int, parameters: Sequence[Tensor], dtype: torch.dtype | None
    ) -> list[list[Tensor]]:
        """Return gradients of the sum of the losses on all batches, with random signs for each; perhaps in a dtype."""
        totals = [[torch.zeros_like(p, dtype=dtype) for p in parameters] for _ in range(DIRECTIONS)]
        for index in range(len(self.batches)):
            with self._own_gradients():
                self._backward(index)
                add_gradients(totals, random_signs(seed, index), [p.grad for p in parameters])
        return totals

    @contextmanager
    def _own_gradients(self) -> Iterator[None]:
        """Set the gradients of the model aside, and restore them."""
        kept = [(p, p.grad) for p in self.model.parameters()]
        try:
            for p, _ in kept:
                p.grad = None
            yield
        finally:
            for p, gradient in kept:
                p.grad = gradient

    def _backward(self, index: int) -> None:
        """Add the gradient of the loss on a batch to the gradients."""
        next(self.passes, None)
        with torch.enable_grad():
            value = self.loss_on(self.batches[index])
            self.undisplaced.setdefault(index, value.detach().double())
            if not value.requires_grad:
                raise MooringError(NO_DEPENDENCE)
            with preserve_other_gradients(value, self.model):
                value.backward()  # type: ignore[no-untyped-call]

    def check_finite(self) -> None:
        """Refuse losses that are not finite where the parameters began."""
        values = [torch.as_tensor(value) for value in self.undisplaced.values()]
        if not all(map(math.isfinite, _host_values(values))):
            raise NonFiniteError(NOT_FINITE)


class _Calibration:
    """States anchored at the present parameters, which are displaced along one direction after the other.

    Args:
        states: the states of the moored parameters.
        budget: the budget.
        losses: the losses on the data.
        probes: what an estimate collected.
    """

    def __init__(self, states: MooringState, budget: Budget, losses: _Losses, probes: Probes | None) -> None:
        self.losses, self.seed = losses, states.tasks
        self.directions: dict[int, tuple[list[Tensor], float]] = {}
        self.distance = _norm(
            (m.parameter.to(m.compute_dtype) - m.device_anchor, m.compute_dtype) for m in _trained(states)
        )
        self.dtypes = [m.compute_dtype for m in _trained(states)]
        self.parameters = [m.parameter for m in _trained(states)]
        self.dtype, self.stored = direction_dtype(self.parameters)
        self.parts = _parts(self.parameters)
        self.count = DIRECTIONS if self.stored else min(DIRECTIONS, len(losses.batches))
        collected = probes.directions_of(self.parameters) if probes else []
        self.directions = {i: self._with_scale(v, i) for i, v in enumerate(collected)}
        if not collected:
            self._compute_directions(0)  # before the eigenbases, which need the memory of the backward passes
        losses.measure_undisplaced()
        losses.check_finite()
        self.held = _states_of_this_task(states)
        self.budget = dataclasses.replace(budget, growth=1.0)
        self.solver = BudgetSolver(self.budget, AnchorOffload(1))

    def __enter__(self) -> "_Calibration":
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()

    def factor(self, nats: float) -> float:
        """Return the factor at which the mean rise over all pairs of a direction and a batch is nats.

        One pair shows about where that is.
        """
        search, pairs = FactorSearch(nats), direction_pairs(len(self.losses.batches), self.count)
        for measured, tolerance in ((pairs[:1], FIRST_TOLERANCE), (pairs, TOLERANCE)):
            search.solve(partial(self._rise, measured), tolerance)
        return search.factor

    def _rise(self, pairs: Sequence[tuple[int, int]], q: float) -> float:
        """Return the mean rise over pairs of a direction and a batch, of v and -v, where the estimate is q."""
        rises: list[Tensor] = []
        for index in sorted({index for index, _ in pairs}, key=lambda index: index not in self.directions):
            v, scale = self._direction(index)
            for by in (scale, -scale):
                self._displace(v, by, q)
                rises += [self.losses.rise(batch) for of, batch in pairs if of == index]
        values = _host_values(rises)  # infinite where the loss overflows, as it may far from the anchor
        return math.fsum(values) / len(values) if all(map(math.isfinite, values)) else math.inf

    def _direction(self, index: int) -> tuple[list[Tensor], float]:
        """Return a direction, which is kept, and the factor of it that is as long as the parameters moved."""
        if index not in self.directions:
            self._restore()
            self._compute_directions(index)
        return self.directions[index]

    def _compute_directions(self, index: int) -> None:
        """Compute the directions that are stored, or a single one, where the parameters are."""
        self.directions.clear()
        if self.stored:
            gradients = self.losses.signed_gradients(self.seed, self.parameters, self.dtype)
            self.directions = {i: self._with_scale(v, i) for i, v in enumerate(gradients)}
        else:
            self.directions[index] = self._with_scale(self.losses.gradient_of(index, self.parameters), index)

    def _with_scale(self, v: list[Tensor], index: int) -> tuple[list[Tensor], float]:
        """Return a gradient and its scale; a random direction if it is zero."""
        norm = _norm(zip(v, self.dtypes, strict=True))
        if not norm:
            generator = torch.Generator().manual_seed(self.seed + index)
            v = [torch.randn(p.shape, generator=generator).to(p) for p in self.parameters]
            norm = _norm(zip(v, self.dtypes, strict=True))
        return v, (self.distance or 1.0) / norm

    @torch.no_grad()
    @autocast_disabled()
    def _displace(self, v: Sequence[Tensor], by: float, nats: float) -> None:
        """Displace the parameters by by * v, pulled back or stretched until the budget is spent."""
        self._move(v, by)
        spent = self.solver.energy(self.held)
        target = (1 - UNSPENT_TOLERANCE / 2) * nats  # that of a pull, so that rounding does not decide to pull
        if 0 < spent < target:
            self._move(v, by * math.sqrt(target / spent))
        self.solver.budget, self.solver.mu = dataclasses.replace(self.budget, nats=nats), {}
        self.solver.apply_pull(self.held, self.parameters, 1)

    def _move(self, v: Sequence[Tensor], by: float) -> None:
        for indices in self.parts:
            anchors = [self.held[i].anchor.to(self.held[i].compute_dtype) for i in indices]
            directions = [v[i].to(anchor.dtype) for i, anchor in zip(indices, anchors, strict=True)]
            moved = torch._foreach_add(anchors, directions, alpha=by)
            torch._foreach_copy_([self.parameters[i] for i in indices], moved)

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
            own.previous = m.importance_state["current"]
            if (scale := scales.get(layer_of(m.name))) is not None:
                own.previous = own.previous * scale
        else:
            unknown = dataclasses.replace(m.factors, basis=None, tasks=0)
            own.factors = m.factors.of_this_task() if m.factors.count else unknown
        held.append(own)
    complete_eigenbases(m.factors for m in held)
    states.join_products({own.parameter: own for own in held})
    return held


def direction_pairs(batches: int, directions: int) -> list[tuple[int, int]]:
    """Return pairs of a direction and a batch: of each batch one, in turn, or several if there are few batches.

    A batch is not paired with the direction of its own number, which may be its gradient, if there is another one.

    Example:
        >>> direction_pairs(8, 4), len(direction_pairs(3, 4))
        ([(0, 3), (0, 7), (1, 0), (1, 4), (2, 1), (2, 5), (3, 2), (3, 6)], 9)
    """
    per_batch = min(max(1, directions - 1), math.ceil(MIN_PAIRS / batches))
    return sorted(((batch + 1 + k) % directions, batch) for batch in range(batches) for k in range(per_batch))


def _parts(parameters: Sequence[Tensor]) -> list[list[int]]:
    """Return the indices of parameters in parts of one device and dtype, with at most MOVED_AT_ONCE weights."""
    parts: list[list[int]] = []
    size = 0
    for i, p in enumerate(parameters):
        first = parameters[parts[-1][0]] if parts else None
        size += p.numel()
        if first is None or (first.device, first.dtype) != (p.device, p.dtype) or size > MOVED_AT_ONCE:
            parts.append([])
            size = p.numel()
        parts[-1].append(i)
    return parts


def _norm(tensors: Iterable[tuple[Tensor, torch.dtype]]) -> float:
    """Return the norm of many tensors together, each computed in a dtype, with one wait for all."""
    return math.hypot(*_host_values(torch.linalg.vector_norm(t, dtype=dtype) for t, dtype in tensors))


def _host_values(numbers: Iterable[Tensor]) -> list[float]:
    """Return 0-d tensors as numbers, with one wait for each device that they are on."""
    listed = list(numbers)
    values = dict[int, float]()
    for device in {number.device for number in listed}:
        indices = [i for i, number in enumerate(listed) if number.device == device]
        values |= zip(indices, torch.stack([listed[i].double() for i in indices]).tolist(), strict=True)
    return [values[i] for i in range(len(listed))]
