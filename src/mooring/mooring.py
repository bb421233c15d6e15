"""Mooring: the object that `mooring.attach` returns. The training step itself is in `mooring.step`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from mooring.backends.budget_terms import pull_energy
from mooring.backends.eager import autocast_disabled
from mooring.diagnose import stability
from mooring.diagnose.coverage import Coverage, find_coverage
from mooring.diagnose.coverage_watch import CoverageWatch
from mooring.diagnose.diagnosis import Diagnosis, diagnose_states
from mooring.diagnose.drift import parameter_drift
from mooring.distributed.dtensor import rank, to_dtensor
from mooring.errors import MooringError
from mooring.hold.distil import make_distillation
from mooring.hold.measure import Gauge, MeasuredPoint, Measurement, make_gauge
from mooring.hold.measured_budget import MeasuredBudget
from mooring.hold.unmeasured import Unmeasured
from mooring.optimizers import (
    ATTACHED,
    check_optimizer,
    observers_of_siblings,
    parameters_of_siblings,
    unwrap_optimizer,
)
from mooring.persistence import Parts, SavedMooring, pack
from mooring.reference.attended import with_lengths
from mooring.reference.batches import Data, Loss, split_batches, split_reference
from mooring.reference.estimation import check_memory, estimate
from mooring.reference.infer_kind import OutputsOfReference, read_outputs
from mooring.reference.kinds import Labels, OutputKind
from mooring.reference.rank_shares import read_batches
from mooring.reference.reading import announce_few_samples, warn_of_unit
from mooring.rules import State
from mooring.rules.pull import check_numbers
from mooring.state.chosen_rules import Rules
from mooring.state.consolidation import layer_scales
from mooring.state.memory import Memory
from mooring.state.mooring_state import MooringState
from mooring.state.selection import layer_of
from mooring.step import TrainingStep


class Mooring:
    """A model moored to what it knows, as `mooring.attach` returns it; that function documents the options.

    Each `optimizer.step()` then checks the task's gradient, adds a penalty's force, takes the optimizer's step, updates
    the importance and applies the pull, in this order. Parameters without a gradient are left alone. `consolidate()`
    ends a task: anchor <- parameter, previous <- merge(previous, current).

    Example:
        >>> import mooring
        >>> model = nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with mooring.attach(model, optimizer) as moor:
        ...     model(torch.ones(1, 2)).sum().backward()
        ...     optimizer.step()
        ...     moor.consolidate()
        >>> moor.previous["weight"]  # half of 0.8 * g^2
        tensor([[0.4000, 0.4000]])
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        rules: Rules,
        exclude: tuple[str, ...],
        outputs: Callable[[Any], Any] | None,
        memory: Memory,
        check_finite: bool | str,
        kind: OutputKind | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self._exclude, self._outputs, self._check_finite = exclude, outputs, check_finite
        self._loss: Loss | None = None
        self._named_kind, self._kind_of_reference = kind, kind
        self._handles: list[Any] = []
        self._finished_at = 0, 0
        self._adopt(self._create(rules, memory))
        self._hook()

    @torch.no_grad()
    def estimate(
        self, data: Data, *, loss: Loss | None = None, batches: int | None = None, progress: bool | None = None
    ) -> None:
        """Estimate this task's importance from data at the present parameters, and replace what training accumulated.

        The model does not change. All batches have the same weight, whatever the importance's decay. EWC's scores
        shrink as batches grow, so use the batch size that you train with.

        Args:
            data: batches of what the model knows, or a function from the model to a batch, such as one that generates
                sequences. A batch is (inputs, labels), or inputs alone, as a tensor or a mapping, for which labels are
                drawn from the model's own prediction, or a mapping with labels for a model that returns its loss, or
                anything that `loss` takes.
            loss: the mean loss of a model on a batch, loss(model, batch); by default the cross entropy.
            batches: the maximum number of batches, or of calls of a function; by default all batches.
            progress: whether to show a progress bar on stderr; by default on a terminal only.

        Example:
            >>> import mooring
            >>> model = nn.Linear(2, 3)
            >>> moor = mooring.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
            >>> moor.estimate([torch.randn(8, 2) for _ in range(4)])  # inputs alone, without labels
            >>> bool((moor.current["weight"] > 0).all())
            True
        """
        self._estimate(data, loss, batches, progress)

    @torch.no_grad()
    def consolidate(
        self,
        *,
        data: Data | None = None,
        loss: Loss | None = None,
        batches: int | None = None,
        progress: bool | None = None,
    ) -> Measurement | None:
        """End a task: protect what was learned from now on.

        anchor <- parameter; previous <- merge(previous, current); then `current` is reset. Parameters without a
        gradient during the task keep their importance. Without a step since the last consolidation nothing is merged
        and no task is counted; a warning says so, and names parameters that moved all the same. A first consolidation
        without a step protects nothing and warns, unless the importance needs no step, as `Uniform`.

        With data, before any step of a task: `current` is first estimated from it, by `estimate`. What a model already
        knows is a task like any other.

        With data, for a `Budget` that is measured, as it is by default: a part of the data is kept to measure on, the
        other part to distil. At the end of each later task `finish()` is called first. A task that is consolidated
        without data is held by the estimate.

        With data, for any other pull, after steps that accumulated an importance: refused, because it has no effect.

        Args:
            data: batches of this task, or a function that makes them, as for `estimate`. A few hundred samples are
                enough, best held out.
            loss: as for `estimate`.
            batches: as for `estimate`.
            progress: as for `estimate`.

        Returns:
            What `finish()` measured at the end of the task: what was forgotten. None if nothing is measured.

        Example:
            >>> import mooring
            >>> model = nn.Linear(2, 2)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> moor = mooring.attach(model, optimizer, pull=mooring.Budget(nats=0.01))
            >>> x, y = torch.randn(64, 2), torch.randint(2, (64,))
            >>> nn.functional.cross_entropy(model(x[:32]), y[:32]).backward()
            >>> optimizer.step()
            >>> moor.consolidate(data=[(x[32:48], y[32:48]), (x[48:], y[48:])])
            >>> moor.measures
            True
        """
        self._refuse_interrupted()
        if data is None and (loss is not None or batches is not None):
            raise MooringError("loss and batches have no effect without data: give consolidate data too, or neither")
        self._meter.rewritten = self._watch.rewritten
        self._watch.end_task(parameters_of_siblings(self._step))
        self._meter.announces = progress is not False
        forgotten: list[Measurement] = []
        with self._restored_on_error():
            gauge, recorded = None, list[Gauge]()
            if data is not None:
                gauge, recorded = self._read_task(data, loss, batches, progress)
            with autocast_disabled():
                waits = gauge is not None and self._meter.distils_all
                end = partial(self._end_task, measured_later=gauge is not None)
                self._states.consolidate(lambda: forgotten.extend(end()), decompose=not waits)
        if self.tasks:
            self._step.norms.consolidate()
            self._meter.start_task(gauge, recorded)
        return forgotten[0] if forgotten else None

    @torch.no_grad()
    def start_epoch(self) -> None:
        """Start an epoch of a task, for importances that read the movement within one: SI or RWalk with path="rising".

        Other importances do not need it, nor does the first epoch of a task.

        Example:
            >>> import mooring
            >>> model = nn.Linear(2, 3)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> moor = mooring.attach(model, optimizer, importance=mooring.SI(path="rising", damping=1e-10))
            >>> moor.start_epoch()
        """
        self._refuse_interrupted()
        for state in self._states.records.values():
            self.importance.start_epoch(state.importance_state, state.displacement)

    def measured(self) -> Measurement:
        """Measure forgetting now: the divergence from the original model on the gauges, or the rise of a loss.

        The model does not change. Under torch.distributed every rank must call it.

        Example:
            >>> import mooring
            >>> model = nn.Linear(2, 3)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> moor = mooring.attach(model, optimizer, reference=[torch.randn(8, 2) for _ in range(6)])
            >>> print(moor.measured())
            0 +- 0 nats on 16 samples
        """
        return self._measuring().measure()

    @property
    def measures(self) -> bool:
        """Whether forgetting is measured, so that `finish()` can keep a budget."""
        return self.tasks > 0 and bool(self._meter.gauges)

    @property
    def running_forgetting(self) -> float | None:
        """What was measured in this task so far, in nats, for logging; None if nothing was.

        It is the mean over the batches of the gauges, each as it was last measured, so it costs nothing.
        """
        return self._meter.running_value()

    @property
    def exceeds_budget(self) -> bool:
        """Whether more than the budget was measured in this task, which was not ended since its last step."""
        value = self.running_forgetting if self.steps and self._finished_at != (self.tasks, self.steps) else None
        return value is not None and value > self.measured_history[-1].named

    @property
    def measured_history(self) -> tuple[MeasuredPoint, ...]:
        """What was measured in training: task, step, nats and the budget. `mooring_lab.report` draws it."""
        self._meter.settle()
        return tuple(self._meter.history)

    def finish(self) -> Measurement:
        """Bring the measured forgetting within the budget, by a repair, and by a return towards the anchor if need be.

        The average of the trained parameters over the last steps, also of excluded ones, takes their place first, if it
        keeps the budget or has forgotten no more than they have, and the task was long enough (`Budget(average=)`).

        Weights that were written since the last step, such as the best of a training, are not replaced by the average.

        `consolidate()` does this by itself. Call it before a model is kept without being consolidated. The value is
        measured on the gauge, so on other data it may be a little larger. Its `ending`, which it prints too, says what
        was done to the model.
        """
        measurement = self._finishing().finish()
        self._finished_at = self.tasks, self.steps
        self._watch.moved_by_mooring()
        return measurement

    @torch.no_grad()
    @autocast_disabled()
    def end_unheld_task(self) -> Measurement | None:
        """End a task that is not consolidated: apply what is due at its end, and keep a budget that is measured.

        Returns:
            What was forgotten; None if nothing is measured.
        """
        self._refuse_interrupted()
        self._meter.rewritten = self._watch.rewritten
        self._watch.before_finish(parameters_of_siblings(self._step))
        forgotten = self._end_task(measured_later=True)  # it is not held at all
        self._watch.moved_by_mooring()
        return next(iter(forgotten), None)

    @contextmanager
    def finished(self) -> Iterator[Measurement]:
        """Keep the budget inside a context, such as for a checkpoint of the model, and restore the parameters after it.

        Example:
            >>> import mooring
            >>> model = nn.Linear(2, 3)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> moor = mooring.attach(model, optimizer, reference=[torch.randn(8, 2) for _ in range(6)])
            >>> with moor.finished() as measurement:
            ...     kept = {name: p.clone() for name, p in model.state_dict().items()}
            >>> measurement.nats
            0.0
        """
        try:
            with self._finishing().finished() as measurement:
                yield measurement
        finally:
            self._watch.moved_by_mooring()

    @property
    def tasks(self) -> int:
        """The number of consolidated tasks."""
        return self._states.tasks

    @property
    def needs_data(self) -> bool:
        """Whether `consolidate()` needs data, because no importance of the present task is kept."""
        return self._states.needs_data

    @property
    def steps(self) -> int:
        """The number of steps since the last consolidation."""
        return self._states.steps

    @property
    def anchor(self) -> State:
        """The anchor of each moored parameter that had a gradient or was consolidated, by name."""
        return {m.name: to_dtensor(m.anchor, m.parameter) for m in self._states.resized()}

    @property
    def previous(self) -> State:
        """The importance over past tasks of each moored parameter, by name; 0 before the first consolidation."""
        return {m.name: to_dtensor(m.full(m.previous), m.parameter) for m in self._states.resized()}

    @property
    def current(self) -> State:
        """The importance on this task of each moored parameter, by name."""
        records = self._states.resized()
        scales = layer_scales(records, self.importance)
        scores = ((m, m.full(m.importance_state.get("current")), scales.get(layer_of(m.name))) for m in records)
        return {m.name: to_dtensor(score if by is None else score * by, m.parameter) for m, score, by in scores}

    @torch.no_grad()
    @autocast_disabled()
    def pull_energy(self) -> float:
        """Return the sum of previous * d^2 / 2 over all moored parameters, for logging."""
        return pull_energy(self._states.resized())

    def drift(self) -> dict[str, float]:
        """Return how far each layer moved since the last consolidation: ||theta - anchor|| / ||anchor||."""
        return parameter_drift((m.name, m.parameter, m.device_anchor) for m in self._states.resized())

    def coverage(self) -> Coverage:
        """Return which parameters are held, which are free by request, and which nothing holds, why, and the remedy.

        A parameter is held if the next pull would return it to its anchor: something is known of a past task, and that
        is not 0 everywhere. Under `fully_shard` every rank must call it.

        Example:
            >>> import mooring
            >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> moor = mooring.attach(model, optimizer, exclude="1")
            >>> print(moor.coverage())
            nothing held yet: first task; for a model that is already trained give a reference=... or load a state
            >>> model(torch.ones(1, 2)).sum().backward()
            >>> optimizer.step()
            >>> moor.consolidate()
            >>> print(moor.coverage())
            2 of 4 parameters held (6 of 9 weights), 2 free by request
            free by request: 1.weight, 1.bias: is excluded; to hold it, leave it out of exclude
        """
        elsewhere, others = self._watch.moved_elsewhere(), parameters_of_siblings(self._step)
        return find_coverage(self._states, self.pull, elsewhere=elsewhere, siblings=others)

    @torch.no_grad()
    def diagnose(self, strength: float | None = None) -> Diagnosis:
        """Return where p = lr * strength * importance leaves (0, 1), layer by layer, and what to do about it.

        The result contains the `coverage()` too. Of a layer with Kronecker factors the importance is their diagonal.

        Args:
            strength: the strength to diagnose; by default that of the pull.

        Example:
            >>> import mooring
            >>> model = nn.Linear(2, 1)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> moor = mooring.attach(model, optimizer, pull=mooring.Penalty(strength=1000.0))
            >>> model(torch.ones(1, 2)).sum().backward()
            >>> optimizer.step()
            >>> moor.consolidate()
            >>> moor.diagnose().total.diverge
            3
        """
        strength = self._strength(strength)
        return replace(diagnose_states(self._states, self.pull, strength), coverage=self.coverage())

    @torch.no_grad()
    def effective_learning_rate(self, i: int, strength: float | None = None) -> State:
        """Return the rate at which a gradient of i iterations ago still counts: lr * (1 - lr * strength * previous)^i.

        Equation 4 of the paper: after n iterations of gradient descent under a penalty,
        theta = anchor - sum_j effective_learning_rate(n - 1 - j) * g_j.
        """
        strength = self._strength(strength)
        rates = stability.learning_rates(self.optimizer)
        return {
            m.name: to_dtensor(stability.effective_learning_rate(rates[p], strength, m.full(m.previous), i), p)
            for p, m in self._states.records.items()
            if p in rates
        }

    def state_dict(self, *, gauge: bool = True) -> State:
        """Return everything needed to resume, as a flat dictionary of tensors (references, not copies).

        `torch.save` and safetensors both take it. Save it beside the model's and the optimizer's own state.

        Args:
            gauge: whether to include the data that a budget is measured on, the data that is distilled, and the
                average of the parameters. Leave it out of a state that others get; they then have the estimate alone.
        """
        self._refuse_interrupted()
        return pack(self._parts, gauge=gauge)

    @torch.no_grad()
    @autocast_disabled()
    def load_state_dict(self, state: State) -> None:
        """Resume from a saved state. A state that does not fit is refused, with the keys, and nothing changes.

        The importance, pull, merge and buffers that `attach` was not given are those of the state. One that was given
        and differs is warned of; another importance is refused.
        """
        saved = SavedMooring(state, self._parts, self._create)
        if saved.parts is not self._parts:
            hooked = bool(self._handles)
            self.detach()
            self._adopt(saved.parts)
            if hooked:
                self._hook()
        saved.load(self._loss, self._outputs, self._named_kind)
        self._kind_of_reference = self._meter.kind or self._named_kind

    def rebind(self, optimizer: torch.optim.Optimizer) -> None:
        """Continue with another optimizer of the same model, if each task has its own; the state stays."""
        self._refuse_interrupted()
        optimizer = unwrap_optimizer(optimizer)
        if optimizer is self.optimizer:
            return
        check_optimizer(self.model, optimizer, self._states.exclude)
        self._watch.warn_of_unseen_steps(parameters_of_siblings(self._step))
        self._unhook()
        self._step.reset()
        self.optimizer = self._states.optimizer = optimizer
        self._states.refresh()
        self._hook()

    def detach(self) -> None:
        """Remove every hook from the model and the optimizer; the state stays readable."""
        self._unhook()
        self._step.norms.release()
        for observer in self._step.observers:
            observer.remove()

    def __enter__(self) -> "Mooring":
        return self

    def __exit__(self, *error: object) -> None:
        self.detach()

    def __deepcopy__(self, memo: Any) -> "Mooring":
        raise MooringError(
            "a Mooring cannot be copied: attach() one to the copied model, and load this one's state_dict()"
        )

    def __reduce__(self) -> str:
        raise MooringError("a Mooring cannot be pickled: save its state_dict(), and load it into an attach()ed one")

    def __repr__(self) -> str:
        count, note = len(self._states.trained()), "" if self.tasks else "; nothing held yet: first task"
        norms = f", frozen_norms={frozen}" if (frozen := self._step.norms.frozen) else ""
        if self.tasks and self._step.budget:
            norms += f", forgetting={'measured' if self._meter.gauges else 'estimated'}"
            if self._meter.gauges and (kind := self._kind_of_reference) is not None:
                norms += f", outputs={kind.name!r}{'' if self._named_kind else ' (inferred)'}"
        elif self._step.budget:
            note += ", nothing to measure"
        return f"Mooring({self.importance!r}, {self.pull!r}, parameters={count}, tasks={self.tasks}{norms}{note})"

    def _create(self, rules: Rules, memory: Memory) -> Parts:
        """Return new parts for these rules and this memory."""
        options = rules.importance, rules.merge, self._exclude, memory, rules.product
        states = MooringState(self.model, self.optimizer, *options)
        watch = CoverageWatch(states, rules.pull)
        step = TrainingStep(states, rules.pull, rules.buffers, self._check_finite, self._outputs, watch)
        if step.budget is None or not step.budget.budget.measured:
            return Parts(rules, states, watch, step, Unmeasured())
        step.meter = meter = MeasuredBudget(states, step.budget, self._outputs)
        return Parts(rules, states, watch, step, meter)

    def _adopt(self, parts: Parts) -> None:
        self._parts, self._states, self._step = parts, parts.states, parts.step
        self._watch, self._meter = parts.watch, parts.meter
        self.importance, self.pull = parts.rules.importance, parts.rules.pull

    def _hook(self) -> None:
        ATTACHED.add(self._step)
        self._handles = [
            self.optimizer.register_step_pre_hook(self._step.before),
            self.optimizer.register_step_post_hook(self._step.after),
        ]
        self._meter.hook()
        if self._step.layers:
            self._step.layers.hook_layers()  # those that were added before `rebind`

    def _unhook(self) -> None:
        ATTACHED.discard(self._step)
        self._step.restore_gradients(finished=False)
        self._meter.unhook()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @contextmanager
    def _restored_on_error(self) -> Iterator[None]:
        """Restore what is known of this task, and what is distilled, if the body fails."""
        distillation, largest = self._meter.distillation, self._meter.largest_scale
        try:
            with self._states.restored_on_error():
                yield
        except BaseException:
            if isinstance(self._meter, MeasuredBudget):
                self._meter.distillation, self._meter.largest_scale = distillation, largest
            raise
        finally:  # not before, because the end of a task may use kernels
            self._step.invalidate()

    def _estimate(
        self,
        data: Data,
        loss: Loss | None,
        batches: int | None,
        progress: bool | None,
        number_of: Sequence[int] = (),
    ) -> None:
        self._refuse_interrupted()
        options: dict[str, Any] = {"loss": loss, "batches": batches, "outputs": self._outputs, "show": progress}
        options["kind"] = self._kind_of_reference
        observers = [*self._step.observers, *observers_of_siblings(self._step)]
        estimate(self._states, observers, data, **options, number_of=number_of)
        self._step.invalidate()

    def _importance_is_known(self) -> bool:
        """Return whether training accumulated an importance of this task, or `estimate()` replaced it."""
        known = self._states.memory.accumulates or not self.steps
        return known and any(m.count for m in self._states.records.values())

    def _read_task(
        self, data: Data, loss: Loss | None, batches: int | None, progress: bool | None
    ) -> tuple[Gauge | None, list[Gauge]]:
        """Estimate the importance of this task from data if it is unknown, and hold a part out if a budget is measured.

        Returns:
            The gauge, and what has just stored the present predictions, from which nothing moves without a step.
        """
        if isinstance(self._meter, MeasuredBudget):
            gauge, distilled = self._hold_out(self._meter, data, loss, batches, progress)
            return gauge, [] if self.steps else [gauge, *distilled]
        if self._importance_is_known():
            raise MooringError(
                "data has no effect, because this task has an importance and nothing is measured: leave data out, call "
                "estimate(data) to replace the importance, or measure with pull=Budget(...)"
            )
        self._estimate(data, loss, batches, progress)
        return None, []

    def _hold_out(
        self, meter: MeasuredBudget, data: Data, loss: Loss | None, batches: int | None, progress: bool | None
    ) -> tuple[Gauge, list[Gauge]]:
        """Return a gauge of a part of the data, and what is distilled of the other part.

        The importance is estimated on the other part, if no step did that.
        """
        meter.settle()
        estimated = self._importance_is_known()
        if not estimated:
            check_memory(self._states)  # before anything is read
        read = [with_lengths(self.model, batch) for batch in read_batches(self.model, data, batches)]
        if progress is not False and not rank():
            announce_few_samples(read)
        seen = self._read_kind(meter, read, loss)
        held_out, others = split_reference(read, whole=seen.whole)
        numbers, other_numbers = split_batches(range(len(read)))
        if not (read and estimated):
            self._estimate(others, loss, None, progress, number_of=other_numbers)
        options: dict[str, Any] = {"kind": seen.kind, "whole": seen.whole}
        distillation = make_distillation(
            self.model, meter.budget, others, loss, self._outputs, other_numbers, **options
        )
        if estimated and distillation is None:
            held_out, numbers = read, [*range(len(read))]
        self._loss = loss
        gauge = make_gauge(self.model, held_out, loss, self._outputs, numbers, **options)
        if estimated or isinstance(seen.kind, Labels):  # the estimate has looked at the outputs of classes
            gauge.warn_of_probabilities(self.model)
        if "pull" not in self._parts.rules.named:
            warn_of_unit(gauge.targets, seen.kind, meter.named)
        if distillation is None:
            return gauge, []
        meter.distillation = meter.distillation.joined(distillation) if meter.distillation else distillation
        return gauge, distillation.references

    def _read_kind(self, meter: MeasuredBudget, read: Sequence[Any], loss: Loss | None) -> OutputsOfReference:
        """Return what the outputs on a reference are, and let the first training step check what was inferred."""
        if not read:
            return OutputsOfReference(self._named_kind, inferred=False, whole=False)
        seen = read_outputs(self.model, read, self._named_kind, self._outputs, loss)
        self._kind_of_reference = seen.kind
        if seen.kind is not None:
            meter.take_kind(seen.kind, whole=seen.whole, checks=seen.inferred)
        return seen

    def _end_task(self, *, measured_later: bool) -> list[Measurement]:
        """Apply what is due at the end of a task, and return what was measured, if anything is.

        Args:
            measured_later: whether forgetting of this task will be measured.
        """
        self._meter.settle()
        self._step.end_task()
        if not isinstance(self._meter, MeasuredBudget) or not self._meter.gauges or not self.steps:
            return []
        forgotten = self._meter.finish()
        if not measured_later:
            self._meter.hold_by_estimate(forgotten.nats)
        return [forgotten]

    def _measuring(self) -> MeasuredBudget:
        if not self.tasks:
            raise MooringError(
                "no task was consolidated and no reference was read yet, so nothing is held and nothing can be "
                "measured: give attach reference=..., or end a task with consolidate(data=...)"
            )
        if self._meter.stopped:
            raise MooringError(
                "the model's outputs changed between attach() or consolidate() and the first step, so this Mooring "
                "measures no more, and forgetting is only estimated, by pull_energy(): load or reset weights before "
                "attach(reference=...), and give attach the outputs= of the state that you load"
            )
        if not isinstance(self._meter, MeasuredBudget) or not self.measures:
            why = "has no data of a past task" if isinstance(self._meter, MeasuredBudget) else "does not measure"
            raise MooringError(
                f"this Mooring {why}, so forgetting is only estimated, by pull_energy(): give attach reference=... and "
                "a Budget(...), or consolidate(data=...)"
            )
        return self._meter

    def _finishing(self) -> MeasuredBudget:
        """Return what measures, and warn of parameters that moved and that nothing held."""
        self._refuse_interrupted()
        meter = self._measuring()
        meter.rewritten = self._watch.rewritten
        self._watch.before_finish(parameters_of_siblings(self._step))
        return meter

    def _strength(self, strength: float | None) -> float:
        if (given := getattr(self.pull, "strength", None) if strength is None else strength) is None:
            raise MooringError(
                f"{type(self.pull).__name__} has no strength: give one, as in diagnose(strength=100.0); "
                "coverage() says what is held"
            )
        if not self.tasks:
            raise MooringError("no task was consolidated yet: call consolidate() at the end of one, then diagnose()")
        check_numbers("strength", given, 0)
        return float(given)

    def _refuse_interrupted(self) -> None:
        if self._step.interrupted:
            raise MooringError("an optimizer step was interrupted half-way: take one whole step first")
        self._step.report_bad_gradients()
