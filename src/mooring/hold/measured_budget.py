"""The measured budget of one model: its gauges, and what a controller reads of it and changes."""

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mooring.backends.budget_solver import BudgetSolver
from mooring.backends.budget_terms import pull_energy
from mooring.backends.eager import autocast_disabled
from mooring.distributed.collectives import all_reduce_many
from mooring.distributed.dtensor import local_tensor, rank, sharded, world_size
from mooring.errors import MooringError, ReturnedWarning, UnheldWarning, announce, warn
from mooring.hold.control import BudgetController, running_value
from mooring.hold.distil import Distillation, gradients_of_divergence
from mooring.hold.finish import ParameterAverage
from mooring.hold.loss_scale import LossScale
from mooring.hold.measure import Gauge, MeasuredHistory, MeasuredPoint, Measurement, combine, unwrapped
from mooring.hold.recent_inputs import RecentInputs
from mooring.hold.repair import PART_OF_BATCH, PLAIN_STEPS, RepairPlan, Sides, part_of_batch
from mooring.reference.batches import Outputs, samples_of
from mooring.reference.kinds import OutputKind
from mooring.reference.preserve_model_state import preserve_model_state
from mooring.rules import Budget, State
from mooring.state.mooring_state import MooringState
from mooring.state.parameter_state import ParameterState

DISTILLED = "distilled"
"""The name of the data that is distilled in a saved state."""

NOTICED = 0.95
"""A return that leaves more than this part of the way is not worth a warning."""

NOISE_BATCHES = 2
"""The number of batches of each gauge that show whether a model gives the same outputs for the same data."""

NOISE = 1e-5
"""The largest value, relative to the budget, that may be measured right after predictions were stored."""


class MeasuredBudget(BudgetController):
    """Gauges, and the controller that makes the measured value meet the budget.

    Args:
        states: the states of the moored parameters.
        solver: solves the budget; its `scale` is what the controller sets.
        outputs: takes what the model returns and gives its outputs; None is as their kind finds them.

    Attributes:
        gauges: one for each past task that has data.
        distillation: adds the gradient of the divergence on the reference, if that is wanted.
        recent: the inputs of the last training batches.
        loss_scale: of the loss of the present task.
        kind: of the outputs; None if they are not known.
        history: the measured values so far.
        noise: what was measured right after the predictions were stored; 0 if the model is deterministic.
        announces: whether a repair is announced on stderr.
        stopped: whether it measures no more, because the outputs changed before the first step of a task.
    """

    distillation: Distillation | None

    def __init__(self, states: MooringState, solver: BudgetSolver, outputs: Outputs | None = None) -> None:
        super().__init__()
        self.states, self.solver = states, solver
        self.gauges: list[Gauge] = []
        self.history = MeasuredHistory()
        self.noise = 0.0
        self.announces, self.stopped = True, False
        self.recent, self.loss_scale = RecentInputs(outputs), LossScale(outputs)
        self.past_references = 0
        self.kind: OutputKind | None = None
        self._measured_on = 0, False

    @property
    def named(self) -> float:
        """The budget of the present task."""
        return float(self.budget.nats)

    @property
    def largest_scale(self) -> float | None:
        """The largest scale, if a past task has no gauge and is held by the estimate; None if all are measured."""
        return None if bool(self.largest.isinf()) else float(self.largest)

    @largest_scale.setter
    def largest_scale(self, largest: float | None) -> None:
        self.largest = _one(math.inf if largest is None else largest)

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
        self.gauges = gauges
        self._hold_unmeasured_tasks()
        self.past_references = len(self.distillation.references) if self.distillation else 0
        self.begin()
        self.recent.clear()
        self.loss_scale.resume(1.0, 0)
        self.hook()
        if gauges:
            self.stopped = False
            self._warn_of_noise()

    def take_kind(self, kind: OutputKind, *, whole: bool, checks: bool) -> None:
        """Take the outputs of training for this kind; `checks` says whether the first step is to check it."""
        self.kind = kind
        self.recent.kind, self.recent.whole = kind, whole
        self.loss_scale.kind, self.loss_scale.checks = kind, checks

    def measure(self) -> Measurement:
        """Return the measured value on all gauges."""
        model = unwrapped(self.states.model)
        result = combine([gauge.measure(model) for gauge in self.gauges])
        nats, error = _agreed(result.nats, self._device), _agreed(result.standard_error, self._device)
        return Measurement(nats, error, result.samples, by_loss=any(gauge.loss is not None for gauge in self.gauges))

    def hook(self) -> None:
        """Observe the model's inputs and outputs in training, if past tasks are distilled."""
        for observer in (self.recent, self.loss_scale) if self.past_references else ():
            observer.hook(unwrapped(self.states.model))

    def unhook(self) -> None:
        """Observe the model no more."""
        for observer in (self.recent, self.loss_scale):
            observer.unhook()

    def gradients(self, parameters: Sequence[Tensor]) -> dict[Tensor, Tensor]:
        """Return what distillation adds to the gradients of these parameters."""
        self.settle()
        if self.gauges and self.states.tasks and not self.states.steps:
            self._check_unchanged()
        if not self.distillation or not self.states.tasks:
            return {}
        if self.loss_scale.observes:
            self.loss_scale.take()
        model, step = unwrapped(self.states.model), self.states.steps
        return self.distillation.gradients(model, parameters, step, self.loss_scale.value)

    def after_step(self) -> None:
        """Measure the next batch if it is due, adjust what may be spent, and average the parameters."""
        if self.distillation and self.states.tasks:
            self.recent.take(self.states.steps)
        if self.gauges and self.states.tasks:
            self.after_step_of_runs(self.states.steps)

    def settle(self) -> Tensor | None:
        """Adjust what may be spent by the last measurement, and add the value to the history."""
        step = self._pending.step if self._pending else 0
        if (measured := super().settle()) is not None:
            self.history.add(MeasuredPoint(self.states.tasks, step, float(measured), self.named))
        return measured

    @torch.no_grad()
    @autocast_disabled()
    def finish(self) -> Measurement:
        """Return towards the anchor until the measured value is within the budget, and measure once more."""
        nats, error = self.finish_runs().squeeze(1).tolist()
        return Measurement(nats, error, *self._measured_on, ending=", ".join(self.endings))

    @torch.no_grad()
    def hold_by_estimate(self, measured: float) -> None:
        """Let the estimate hold a task that ends without a gauge, as strictly as the measured value shows is needed.

        Args:
            measured: what is measured at the present parameters, before they become the anchor. The scale with which
                the estimate would be the same there limits the scale from here on.
        """
        self.limit_to_measured(_one(measured - self.noise))

    def _hold_unmeasured_tasks(self) -> None:
        """Let the estimate hold tasks without a gauge, if there are fewer gauges than past tasks."""
        if len(self.gauges) < self.states.tasks:
            self.largest = self.largest.clamp(max=1.0)
        self.set_scales(self.get_scales().minimum(self.largest))

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
        if bool(self.latest.isnan().all()):
            return None
        return float(running_value(self.latest, self.samples, self.batches_of_gauges()))

    # What the controller reads and changes

    @property
    def budget(self) -> Budget:
        """The budget."""
        return self.solver.budget

    @property
    def task(self) -> int:
        """The number of consolidated tasks."""
        return self.states.tasks

    @property
    def records(self) -> Collection[ParameterState]:
        """The states of the moored parameters."""
        return self.states.records.values()

    def batches_of_gauges(self) -> list[int]:
        """Return the number of batches of each gauge."""
        return [len(gauge) for gauge in self.gauges]

    def measure_batch(self, index: int) -> Tensor:
        """Return the sums and counts of the samples of a batch, (2, 1, samples)."""
        gauge, local = self._batch(index)
        return _mean_over_ranks(gauge.sums_and_counts(unwrapped(self.states.model), [local])).unsqueeze(1)

    def measure_runs(self) -> Tensor:
        """Return the measured value and its standard error, (2, 1)."""
        result = self.measure()
        self._measured_on = result.samples, result.by_loss
        return torch.tensor([[result.nats], [result.standard_error]], dtype=torch.float64)

    def get_scales(self) -> Tensor:
        """Return the factor of what the estimate may spend."""
        return _one(self.solver.scale)

    def set_scales(self, scales: Tensor) -> None:
        """Set that factor."""
        self.solver.scale = float(scales)

    def set_acts(self, acts: bool) -> None:
        """Set whether the budget's pull acts."""
        self.solver.acts = acts

    def sides(self) -> Sides | None:
        """Return what a repair moves; None if nothing is distilled, or nothing moved."""
        model = unwrapped(self.states.model)
        moved = [state for state in self.records if state.count and state.parameter.requires_grad]
        known = self.distillation.references if self.distillation else []
        references = known[: self.past_references]  # data of this task may have been read already
        if not references or not moved:
            return None
        old = sum(samples_of(reference.batches[0]) for reference in references) / len(references)
        kept, new = self.recent.recorded(model), None
        sizes = [samples_of(batch) for batch in kept.batches] if kept else [0]
        samples, recorded = _summed(sizes[0], sum(sizes))
        own = part_of_batch(samples)
        if kept and own:
            new = kept.split(math.ceil(own / world_size()))
        if self.announces and not rank():
            announce(
                f"more than {self.named:g} nats are measured: repairing, for about as long as {PLAIN_STEPS} steps take"
                + ("" if new else ", on old inputs alone, because no inputs of this task are known or can be repeated")
            )
        batches = max(1, round(own / max(old, 1)))
        parameters = [state.parameter for state in moved]

        def gradients(step: int, weight: Tensor) -> list[Tensor | None]:
            total: dict[Tensor, Tensor] = {}
            for index in range(step * batches, (step + 1) * batches):
                turn, task = divmod(index, len(references))
                part = gradients_of_divergence(references[task], model, parameters, turn % len(references[task]))
                _add(total, part, float(weight) / batches)
            if new:
                part = gradients_of_divergence(new, model, parameters, step % len(new))
                _add(total, _mean_of_gradients(part), 1.0)
            return [local_tensor(total[p]) if p in total else None for p in parameters]

        gauge = sum(samples_of(batch) for known in self.gauges for batch in known.batches)
        plan = RepairPlan.within_limit(samples or old / PART_OF_BATCH, batches * old + own, gauge, recorded)
        thetas = [state.theta for state in moved]
        displacements = [state.theta - state.device_anchor.to(state.theta.dtype) for state in moved]
        return Sides(thetas, displacements, parameters, False, gradients, self.measure_runs, plan)

    def binding(self) -> Tensor:
        """Return whether the budget's pull acts in this step."""
        if not self.solver.acts:  # its multiplier may be of the end of the task before
            return torch.zeros(1, dtype=torch.bool, device=self._device)
        return self.solver.mu.to(self._device, non_blocking=True).reshape(1) > 0

    def energy(self) -> Tensor:
        """Return what is spent by the estimate."""
        return _one(pull_energy(self.records))

    def pull(self) -> None:
        """Apply the budget's pull to all parameters that train."""
        moved = [state.parameter for state in self.records if state.parameter.requires_grad]
        self.solver.apply_pull(self.records, moved, self.task)

    def multipliers(self) -> dict[str, Any]:
        """Return the multipliers."""
        return self.solver.state()

    def load_multipliers(self, multipliers: dict[str, Any], runs: Tensor) -> None:
        """Continue from the multipliers."""
        self.solver.load_state(multipliers)

    def averaged_parameters(self) -> Collection[Tensor]:
        """Return the parameters that are trained, also excluded ones."""
        return self.states.trained_by_name().values()

    def warn_of_return(self, runs: Tensor, before: Tensor, share: Tensor) -> None:
        """Warn that the model was returned towards its anchor."""
        if float(share) > NOTICED:
            return
        warn(
            f"the end of the task gave up a part of what was learned: {float(before):.3g} nats were measured and "
            f"{self.named:g} are allowed, so the model went back to {100 * float(share):.0f} % of the way from the old "
            "one; to give up less, name a larger budget, give a larger reference, or train with a lower learning rate",
            ReturnedWarning,
        )

    def warn_of_unkept(self, runs: Tensor, least: Tensor) -> None:
        """Warn of a model that exceeds its budget even at the anchor."""
        warn(
            f"the budget of {self.named:g} nats cannot be kept: at the anchor itself {float(least):.3g} nats are "
            "measured; check that the model is deterministic in eval mode, and that no buffers or excluded parameters "
            "that it depends on have changed",
            UnheldWarning,
        )

    def _check_unchanged(self) -> None:
        """Warn, and measure no more, if the outputs changed before the first step of a task."""
        try:
            measured = self.gauges[0].measure(unwrapped(self.states.model), [0])
            first = _agreed(measured.nats, self._device) if measured.samples else 0.0
        except MooringError as error:
            if error.__cause__ is not None:  # the model does not take the data
                raise
            first = math.inf  # the outputs have another shape
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
        self.gauges, self.distillation, self._pending = [], None, None
        self.stopped, self.largest_scale = False, None
        self.begin()
        self.solver.limit_to_estimate()

    def _warn_of_noise(self) -> None:
        with preserve_model_state(self.states.model):
            torch.manual_seed(len(self.samples))  # other random numbers than when predictions were stored
            model, first = unwrapped(self.states.model), range(NOISE_BATCHES)
            parts = [gauge.measure(model, first[: len(gauge)]) for gauge in self.gauges]
            both = combine(parts)
            self.noise = noise = abs(_agreed(both.nats, self._device)) if both.samples else 0.0
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
        self.distillation = Distillation(distilled) if distilled else None
        self.gauges = [gauge for name, gauge in gauges.items() if not name.startswith(DISTILLED)]
        self.past_references = len(distilled)
        self.kind = None
        for gauge in [gauge for gauge in (*self.gauges, *distilled) if gauge.loss is None][-1:]:
            self.take_kind(gauge.kind, whole=gauge.whole, checks=False)
        self.load_state(state)
        self._hold_unmeasured_tasks()
        self.set_acts(not self.distils_all)
        self.average = ParameterAverage()
        if self.averages:
            self.average.load(state.get("average", {}), tensors, self.states.trained_by_name())

    def state(self) -> dict[str, Any]:
        """Return what the controller carries from step to step, as plain values."""
        self.settle()
        distils = self.distillation
        schedule: dict[str, Any] = {"loss_scale": [self.loss_scale.value, self.loss_scale.steps]}
        if distils:
            schedule |= {"weight": float(distils.weight), "task_norm": float(distils.task_norm)}
            schedule["distils_every"] = distils.every
        updates = self.average.updates(self.states.trained_by_name())
        known = zip(self.latest[0].tolist(), self.samples.tolist(), strict=True)
        latest = [None if math.isnan(value) else [value, samples] for value, samples in known]
        return {
            "latest": latest,
            **schedule,
            **({"average": updates} if updates else {}),
            "history": self.history.plain(),
        }

    def tensors(self) -> State:
        """Return the average of the parameters, by the keys of a saved state."""
        return self.average.tensors(self.states.trained_by_name())

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        pairs = [(math.nan, 0.0) if pair is None else pair for pair in state["latest"]]
        self.latest, self.samples = torch.tensor(pairs, dtype=torch.float64).view(-1, 2).unbind(1)
        self.latest = self.latest.unsqueeze(0).clone()
        self.history = MeasuredHistory(state.get("history", ()))
        self.loss_scale.resume(*state.get("loss_scale", (1.0, 0)))
        self.hook()
        if self.distillation:
            self.distillation.every = state.get("distils_every", 1)
            self.distillation.task_norm = _one(state.get("task_norm", 0.0))
            self.distillation.weight = _one(max(1.0, state.get("weight", 1.0)))


def _one(value: float) -> Tensor:
    """Return the vector of one run."""
    return torch.tensor([value], dtype=torch.float64)


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


def _summed(*numbers: int) -> list[int]:
    """Return the sums of numbers over ranks; 0 if one rank has a 0 that the others do not have."""
    if world_size() == 1:
        return [*numbers]
    gathered: list[Any] = [None] * world_size()
    dist.all_gather_object(gathered, numbers)
    return [sum(own) if all(own) else 0 for own in zip(*gathered, strict=True)]


def _mean_of_gradients(gradients: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
    """Return the mean over ranks, whose inputs differ; gradients of shards are means already."""
    if world_size() == 1:
        return gradients
    whole = [p for p in gradients if not sharded(p)]
    means = (total / world_size() for total in all_reduce_many([gradients[p] for p in whole]))
    return gradients | dict(zip(whole, means, strict=True))


def _add(total: dict[Tensor, Tensor], gradients: dict[Tensor, Tensor], factor: float) -> None:
    """Add factor * gradients to a total, in place."""
    for p, g in gradients.items():
        total[p] = total[p].add_(g, alpha=factor) if p in total else factor * g
