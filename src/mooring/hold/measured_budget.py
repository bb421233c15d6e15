"""A budget that is measured during training, and kept at the end of a task by a last return towards the anchor."""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mooring.backends.budget_solver import UNUSED_PULL, BudgetSolver
from mooring.backends.budget_terms import pull_energy
from mooring.backends.eager import autocast_disabled
from mooring.backends.host_copy import HostCopy
from mooring.distributed.dtensor import local_tensor, world_size
from mooring.errors import MooringError, UnheldWarning, first_line, warn
from mooring.hold.average import FEWEST_UPDATES, ParameterAverage
from mooring.hold.controller import RESERVE, next_scale
from mooring.hold.distillation import Distillation, first_weight, weight_control
from mooring.hold.gauge import Gauge, unwrapped
from mooring.hold.history import MeasuredHistory, MeasuredPoint
from mooring.hold.measurement import Measurement, combine, ratio_of_sums
from mooring.reference.pass_cost import MEASURING_INTERVAL
from mooring.reference.preserve_model_state import preserve_model_state
from mooring.rules import State
from mooring.state.mooring_state import MooringState
from mooring.state.parameter_state import ParameterState

GAIN = 1.0
"""The controller's gain over one pass through all batches of the gauges."""

FAR, FAR_GAIN = 3.0, 0.5
"""If a batch exceeds the budget by the first factor, it is acted upon alone, with the second as the gain."""

BISECTIONS = 10
"""The number of bisections of the last return towards the anchor."""

Ends = list[tuple[ParameterState, Tensor]]
"""The parameters where training left them, on this rank."""

STRONGEST_PULL = 1e-6
"""The part of the present estimate that the strongest pull at the end of a task leaves."""

DISTILLED = "distilled"
"""The name of the data that is distilled in a saved state."""

SIGNIFICANT = 0.1
"""The part of the budget above which a measured value says how wrong the estimate is."""

SMALLEST_SCALE = 0.01
"""The smallest scale that a measured value gives the estimate of tasks without a gauge."""

NOISE_BATCHES = 2
"""The number of batches of each gauge that show whether a model gives the same outputs for the same data."""

NOISE = 1e-5
"""The largest value, relative to the budget, that may be measured right after predictions were stored."""


@dataclass(frozen=True)
class _PendingMeasurement:
    """A measurement of one batch whose result is on its way to the host.

    Attributes:
        index: the number of the batch.
        step: the number of steps in the task.
        terms: the sums and counts of its samples, (2, samples).
        binding: whether the pull acted in that step.
    """

    index: int
    step: int
    terms: HostCopy
    binding: HostCopy


class MeasuredBudget:
    """Gauges, and the controller that makes the measured value meet the budget.

    Every few steps one batch of a gauge is measured. The latest values of all batches together give the measured value,
    and the controller adjusts what the budget's estimate may spend.

    Args:
        states: the states of the moored parameters.
        solver: solves the budget; its `scale` is what the controller sets.

    Attributes:
        gauges: one for each past task that has data.
        distillation: adds the gradient of the divergence on the reference, if that is wanted.
        average: the average of the trained parameters in this task; empty unless it `averages`.
        history: the measured values so far.
        latest: the last measured value of each batch in this task; None where there is none yet.
        noise: what was measured right after the predictions were stored; 0 if the model is deterministic.
        stopped: whether it measures no more, because the outputs changed before the first step of a task.
        largest_scale: the largest scale of the solver, if a past task has no gauge and is held by the estimate; None if
            all tasks are measured.
    """

    def __init__(self, states: MooringState, solver: BudgetSolver) -> None:
        self.states, self.solver, self.budget = states, solver, solver.budget
        self.gauges: list[Gauge] = []
        self.distillation: Distillation | None = None
        self.average = ParameterAverage()
        self.history = MeasuredHistory()
        self.latest: list[list[float] | None] = []
        self.noise = 0.0
        self.stopped = False
        self.largest_scale: float | None = None
        self._pending: _PendingMeasurement | None = None

    @property
    def named(self) -> float:
        """The budget of the present task."""
        return float(self.budget.nats)

    def start_task(self, gauge: Gauge | None = None, recorded: Collection[Gauge] = ()) -> None:
        """Store the predictions of the present model, also on a new gauge: what is forgotten counts from here.

        Args:
            gauge: the gauge of the task that is over.
            recorded: gauges that have just stored them.
        """
        self.settle()
        gauges = [*self.gauges, gauge] if gauge else self.gauges
        distilled = self.distillation.references if self.distillation else []
        for known in [*gauges, *distilled]:
            if known not in recorded:
                known.record(unwrapped(self.states.model))
        if self.distillation and (gauge is None or gauge.loss is not None):  # no data of this task is distilled
            self.distillation.weight = first_weight(self.named, self.distillation.control)
        self._limit_scale(len(gauges))
        if gauges and not self.gauges and self._pull_waits and self.named:
            self.solver.scale = UNUSED_PULL
        self.gauges, self.latest = gauges, [None] * sum(map(len, gauges))
        self.average = ParameterAverage()
        if gauges:
            self.stopped = False
            self._warn_of_noise()

    def measure(self) -> Measurement:
        """Return the measured value on all gauges."""
        model = unwrapped(self.states.model)
        result = combine([gauge.measure(model) for gauge in self.gauges])
        nats, error = _agreed(result.nats, self._device), _agreed(result.standard_error, self._device)
        return Measurement(nats, error, result.samples, by_loss=any(gauge.loss is not None for gauge in self.gauges))

    @property
    def _pull_waits(self) -> bool:
        """Whether distillation holds the budget, beside an optimizer such as Adam, and the pull is in reserve."""
        return self.distillation is not None and self.distillation.control.normalized and self.largest_scale is None

    @property
    def pull_is_unused(self) -> bool:
        """Whether the pull is in reserve and no measurement asked for it, so that importance is not read so far."""
        return self._pull_waits and (not self.gauges or self.solver.is_unused)

    @property
    def averages(self) -> bool:
        """Whether the end of a task may take the average of the parameters."""
        return self.budget.average is not False

    def follow_optimizer(self) -> None:
        """Distil as the present optimizer needs it; a pull that waited beside the one before keeps the budget now."""
        if not self.distillation:
            return
        waited = self._pull_waits
        self.distillation.control = weight_control(self.states.optimizer)
        if waited and not self._pull_waits:
            self.solver.limit_to_estimate()

    def gradients(self, parameters: Sequence[Tensor]) -> dict[Tensor, Tensor]:
        """Return what distillation adds to the gradients of these parameters."""
        self.settle()
        if self.gauges and self.states.tasks and not self.states.steps:
            self._check_unchanged()
        if not self.distillation or not self.states.tasks:
            return {}
        return self.distillation.gradients(unwrapped(self.states.model), parameters, self.states.steps)

    def after_step(self) -> None:
        """Measure the next batch if it is due, adjust what may be spent, and average the parameters."""
        number, remainder = divmod(self.states.steps, MEASURING_INTERVAL)
        if not self.gauges or remainder or not self.states.tasks:
            return
        index = (number - 1) % len(self.latest)
        gauge, local = self._batch(index)
        terms = _mean_over_ranks(gauge.sums_and_counts(unwrapped(self.states.model), [local]))
        binding = self._binding(terms.device)
        self._pending = _PendingMeasurement(index, self.states.steps, HostCopy(terms), HostCopy(binding))
        if self._pending.terms.ready:
            self.settle()
        self.average.update(self.states.trained_by_name().values() if self.averages else ())

    def settle(self) -> None:
        """Adjust what may be spent by the last measurement, if its result was not read yet.

        On a GPU the result is read in the next step, after its backward pass is queued, so that the GPU has work while
        the host waits. Nothing depends on it before.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        index, binding = pending.index, bool(pending.binding.tolist())
        part = ratio_of_sums(*pending.terms.tolist())
        value = part.nats
        limit = RESERVE * self.named if self._pull_waits else self.named
        far = not value <= FAR * limit
        if far:  # what was measured before says little by now
            self.latest = [None] * len(self.latest)
        self.latest[index] = [value, float(part.samples)]
        measured = self.running_value()
        assert measured is not None
        self.history.add(MeasuredPoint(self.states.tasks, pending.step, measured, self.named))
        gain = FAR_GAIN if far else GAIN / len(self.latest)
        self.solver.scale = next_scale(self.solver.scale, measured, limit, gain=gain, binding=binding)
        self._limit_scale(len(self.gauges))
        if self.distillation:
            self.distillation.adjust(value, self.named, GAIN / len(self.latest), binding=binding)

    def _binding(self, device: torch.device) -> Tensor:
        """Return whether the budget's pull acts in this step, on a device."""
        if self.solver.is_unused:  # its multiplier may be of the end of the task before
            return torch.zeros((), dtype=torch.bool, device=device)
        return self.solver.mu.to(device, non_blocking=True) > 0

    @torch.no_grad()
    @autocast_disabled()
    def finish(self) -> Measurement:
        """Return towards the anchor until the measured value is within the budget, and measure once more.

        The average of the parameters takes their place before that, see `_take_average`. Of the returns, the
        budget's own pull goes first, because it gives up least of what was learned. If no pull is strong enough, the
        parameters are interpolated with the anchor, where the value is 0.
        """
        self.settle()
        result = self._take_average(self.measure())
        if result.nats <= self.named:
            return result
        ends = [(state, state.theta.clone()) for state in self.states.records.values()]
        scale = self.solver.scale
        for path in (self._pull_path(ends), self._straight_path(ends)):
            if path is not None and (kept := self._last_kept(path)) is not None:
                self.solver.scale = scale  # that of training, from which the next task starts
                return kept
        least = self.measure().nats  # at the anchor
        self.solver.scale = scale
        for state, theta in ends:
            state.theta.copy_(theta)
        warn(
            f"the budget of {self.named:g} nats cannot be kept: at the anchor itself {least:.3g} nats are measured; "
            "check that the model is deterministic in eval mode, and that no buffers or excluded parameters that it "
            "depends on have changed",
            UnheldWarning,
        )
        return result

    @torch.no_grad()
    def hold_by_estimate(self, measured: float) -> None:
        """Let the estimate hold a task that ends without a gauge, as strictly as the measured value shows is needed.

        Args:
            measured: what is measured at the present parameters, before they become the anchor. The scale with which
                the estimate would be the same there limits the scale from here on. It is at most 1, and not much less,
                because excluded parameters and statistics add to what is measured, and not to the estimate.
        """
        self.largest_scale = 1.0 if self.largest_scale is None else self.largest_scale
        allowed, changed = float(self.budget.allowed(self.states.tasks)), measured - self.noise
        if allowed and SIGNIFICANT * self.named < changed < math.inf:
            estimated = pull_energy(self.states.records.values()) / allowed
            if estimated > 0:
                fitting = max(SMALLEST_SCALE, estimated * self.named / changed)
                self.largest_scale = min(self.largest_scale, fitting)

    def _limit_scale(self, gauges: int) -> None:
        """Let the estimate hold tasks without a gauge, if there are fewer gauges than past tasks."""
        if gauges < self.states.tasks and self.largest_scale is None:
            self.largest_scale = 1.0
        if self.largest_scale is not None:
            self.solver.scale = min(self.solver.scale, self.largest_scale)

    def _take_average(self, last: Measurement) -> Measurement:
        """Replace the parameters by their average if that keeps the budget, or has forgotten no more than they have."""
        fewest = 1 if self.budget.average else FEWEST_UPDATES
        pairs = self.average.pairs(self.states.trained_by_name().values(), fewest) if self.averages else []
        if not pairs:
            return last
        parameters, averages = map(list, zip(*pairs, strict=True))
        ends = [theta.clone() for theta in parameters]
        torch._foreach_copy_(parameters, averages)
        measured: Measurement | None = None
        try:
            measured = self.measure()
        finally:
            taken = measured is not None and measured.nats <= max(last.nats, self.named)
            if not taken:
                torch._foreach_copy_(parameters, ends)
        return measured if taken else last

    @contextmanager
    def finished(self) -> Iterator[Measurement]:
        """Keep the budget inside the context, and restore the parameters after it, also excluded ones."""
        self.settle()
        moved = (local_tensor(p).detach() for p in {**self.states.records, **dict.fromkeys(self.average)})
        ends = [(theta, theta.clone()) for theta in moved]
        spent = self.solver.state()
        try:
            yield self.finish()
        finally:
            with torch.no_grad():
                for theta, end in ends:
                    theta.copy_(end)
            self.solver.load_state(spent)

    def _last_kept(self, path: Callable[[float], None]) -> Measurement | None:
        """Go to the farthest point of a path, from 0 to 1, that keeps the budget; None if its beginning does not."""
        path(0.0)
        if not self.measure().nats <= self.named:
            return None
        low, high = 0.0, 1.0
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            path(middle)
            low, high = (middle, high) if self.measure().nats <= self.named else (low, middle)
        path(low)
        while (kept := self.measure()).nats > self.named:  # by rounding
            low = 0.98 * low if low > 1e-3 else 0.0
            path(low)
        return kept

    def _pull_path(self, ends: Ends) -> Callable[[float], None] | None:
        """Return the path along which the budget's pull gets stronger; None if it has nothing to hold."""
        energy, task = pull_energy([state for state, _ in ends]), self.states.tasks
        allowed = float(self.budget.allowed(task))
        if not (energy and allowed and math.isfinite(energy)):
            return None
        moved = [state.parameter for state, _ in ends if state.parameter.requires_grad]
        start = self.solver.state()

        def path(t: float) -> None:
            self.solver.load_state(start)  # the search depends on where it starts
            for state, theta in ends:
                state.theta.copy_(theta)
            self.solver.scale = STRONGEST_PULL ** (1 - t) * energy / allowed
            self.solver.apply_pull(self.states.records.values(), moved, task)

        return path

    def _straight_path(self, ends: Ends) -> Callable[[float], None]:
        def path(t: float) -> None:
            for state, theta in ends:
                anchor = state.device_anchor.to(state.compute_dtype)
                state.theta.copy_(anchor.lerp(theta.to(state.compute_dtype), t) if t else anchor)

        return path

    def _batch(self, index: int) -> tuple[Gauge, int]:
        """Return the gauge of a batch, and its number there."""
        for gauge in self.gauges:
            if index < len(gauge):
                return gauge, index
            index -= len(gauge)
        raise IndexError(index)

    def running_value(self) -> float | None:
        """Return the measured value from the latest of each batch; None before the first in a task."""
        self.settle()
        values, parts = iter(self.latest), []
        for gauge in self.gauges:
            known = [pair for pair in (next(values) for _ in gauge.batches) if pair is not None]
            if known:
                samples = math.fsum(pair[1] for pair in known)
                parts.append(Measurement(math.fsum(v * n for v, n in known) / samples, 0.0, int(samples)))
        return combine(parts).nats if parts else None

    def _check_unchanged(self) -> None:
        """Warn, and measure no more, if the outputs changed before the first step of a task."""
        try:
            first = _agreed(self.gauges[0].measure(unwrapped(self.states.model), [0]).nats, self._device)
        except MooringError:  # the outputs have another shape
            first = math.inf
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise MooringError(
                f"the model does not take the data or reference any more ({first_line(error)}): change its layers or "
                "its dtype, as in model.to(dtype), before attach"
            ) from error
        if abs(first) <= max(NOISE, 0.1 * self.named) + 3 * self.noise:
            return
        changed = f"changed by {first:.2g} nats" if math.isfinite(first) else "changed"
        warn(
            f"the model's outputs on past data {changed} before the first step of this task, so forgetting is only "
            "estimated: load or reset weights before attach() or consolidate(), or exclude a head that is reset and "
            "leave the old one in the model",
            UnheldWarning,
        )
        self.clear()
        self.stopped = True

    def clear(self) -> None:
        """Forget all gauges, so that forgetting is only estimated: no more than the budget may be spent by estimate."""
        self.gauges, self.latest, self.distillation, self._pending = [], [], None, None
        self.stopped, self.largest_scale = False, None
        self.average = ParameterAverage()
        self.solver.limit_to_estimate()

    def _warn_of_noise(self) -> None:
        with preserve_model_state(self.states.model):
            torch.manual_seed(len(self.latest))  # other random numbers than when predictions were stored
            model, first = unwrapped(self.states.model), range(NOISE_BATCHES)
            parts = [gauge.measure(model, first[: len(gauge)]) for gauge in self.gauges]
            self.noise = noise = abs(_agreed(combine(parts).nats, self._device))
        if self.named and noise > max(NOISE, 0.01 * self.named):
            warn(
                f"the model's outputs differ from call to call, so {noise:.2g} nats of forgetting are measured where "
                "there is none: make it deterministic in eval mode, or name a larger budget"
            )

    @property
    def _device(self) -> torch.device:
        return next(iter(self.states.records.values())).theta.device

    def named_gauges(self) -> dict[str, Gauge]:
        """Return the gauges by the names that they have in a saved state."""
        gauges = {str(number): gauge for number, gauge in enumerate(self.gauges)}
        distilled = self.distillation.references if self.distillation else []
        return gauges | {f"{DISTILLED}{number or ''}": gauge for number, gauge in enumerate(distilled)}

    def load_gauges(self, gauges: dict[str, Gauge], state: dict[str, Any], tensors: State) -> None:
        """Continue with saved gauges, the state of the controller, and the average among the tensors of a state."""
        self._pending, self.stopped = None, False
        distilled = [gauge for name, gauge in gauges.items() if name.startswith(DISTILLED)]
        control = weight_control(self.states.optimizer)
        self.distillation = Distillation(distilled, self.named, control=control) if distilled else None
        self.gauges = [gauge for name, gauge in gauges.items() if not name.startswith(DISTILLED)]
        self.load_state(state)
        self._limit_scale(len(self.gauges))
        if self.solver.is_unused and not (self._pull_waits and self.named):
            self.solver.limit_to_estimate()  # the state is from training beside another kind of optimizer
        self.average = ParameterAverage()
        if self.averages:
            self.average.load(state.get("average", {}), tensors, self.states.trained_by_name())

    def state(self) -> dict[str, Any]:
        """Return what the controller carries from step to step, as plain values."""
        self.settle()
        distils = self.distillation
        schedule = {"weight": distils.weight, "distils_every": distils.every} if distils else {}
        updates = self.average.updates(self.states.trained_by_name())
        return {
            "latest": self.latest,
            **schedule,
            **({"average": updates} if updates else {}),
            "history": self.history.plain(),
        }

    def tensors(self) -> State:
        """Return the average of the parameters, by the keys of a saved state."""
        return self.average.tensors(self.states.trained_by_name())

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        self.latest = [None if pair is None else list(map(float, pair)) for pair in state["latest"]]
        self.history = MeasuredHistory(state.get("history", ()))
        if self.distillation and "weight" in state:
            self.distillation.weight, self.distillation.every = state["weight"], state.get("distils_every", 1)


def _agreed(value: float, device: torch.device) -> float:
    """Return the mean over ranks, which all see the same data, so that rounding cannot make them disagree."""
    if world_size() == 1:
        return value
    total = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return float(total) / world_size()


def _mean_over_ranks(values: Tensor) -> Tensor:
    """Return the mean over ranks, as `_agreed` does, on the device."""
    if world_size() > 1:
        dist.all_reduce(values)
        values /= world_size()
    return values
