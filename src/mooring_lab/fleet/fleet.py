"""A fleet: runs of one shape that go through one stream together, as one computation.

`Fleet.run` is the loop over tasks, epochs and steps; `Fleet._step` is one iteration of every run.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from mooring.backends.eager import has_compiler
from mooring.errors import MooringError
from mooring_lab.fleet.data import EpochIndices, TrainingData
from mooring_lab.fleet.evaluation import Evaluation, evaluation_heads, inherits_head
from mooring_lab.fleet.gpu.cuda_graphs import GraphRecorder
from mooring_lab.fleet.gpu.run_kernel import NEVER
from mooring_lab.fleet.gradient_sharing import GradientSharing
from mooring_lab.fleet.grouping import fleet_shape, strength_groups
from mooring_lab.fleet.learner_plugin import EpochPlan, LearnerPlugin, Step, Tensors
from mooring_lab.fleet.measurements import cka_of, drift_of, finite_runs
from mooring_lab.fleet.method_groups import MethodGroups
from mooring_lab.fleet.passes import Passes
from mooring_lab.fleet.record import LossHistory, RunRecord, versions
from mooring_lab.fleet.run_optimizers import make_optimizer
from mooring_lab.fleet.run_statistics import RunStatistics
from mooring_lab.fleet.stack.stack import Stack
from mooring_lab.fleet.stack.stack_observer import StackObserver
from mooring_lab.model.known_methods import find_method, method_rank
from mooring_lab.model.method import PluginOptions
from mooring_lab.model.order import batch_sizes
from mooring_lab.model.precision import check_precision, parameter_dtype, product_dtype, tf32_mode
from mooring_lab.model.results import Result, Status
from mooring_lab.model.spec import RunSpec
from mooring_lab.networks.initialization import BackboneWeights, initial_networks
from mooring_lab.networks.inputs import normalize_pixels
from mooring_lab.streams.stream import Stream

FAILURE_CHECK_INTERVAL = 50
"""The host waits for a GPU after so many steps, to see which runs failed."""

MIN_FAILED_SHARE = 0.2
"""Failed runs are removed within a task once they are more than this share: the others must then be recorded again."""


@dataclass(frozen=True)
class Position:
    """The next step of a fleet, as task, epoch and step within the epoch."""

    task: int = 0
    epoch: int = 0
    step: int = 0


class FleetCallback(Protocol):
    """A callback that follows a fleet."""

    def on_step(self, fleet: "Fleet") -> None:
        """Run between two steps; may save the fleet, or raise to stop it."""

    def on_task_end(self, fleet: "Fleet") -> None:
        """Run after each task."""


class Fleet:
    """Several runs as one computation, each with its own seed, weights, data order, learning rate and strength.

    The result of a run depends on its own spec alone. A run whose gradient is not finite is stopped before the step,
    marked unstable and removed; the others continue.

    Args:
        specs: the runs, of one shape.
        stream: the stream of tasks.
        device: the device to compute on.
        weights: initial weights of backbones, by fingerprint.
        reject: remove runs after the first task whose penalty does not interpolate everywhere.

    Example:
        >>> from mooring_lab.streams import by_class, digits
        >>> stream = by_class(digits(), per_task=5)
        >>> specs = [RunSpec("digits", stream.fingerprint, "explicit-ewc", seed, epochs=1) for seed in (0, 1)]
        >>> [result.status for result in Fleet(specs, stream).run()]
        ['finished', 'finished']
    """

    def __init__(
        self,
        specs: Sequence[RunSpec],
        stream: Stream,
        *,
        device: torch.device | str = "cpu",
        weights: Mapping[str, BackboneWeights] | None = None,
        reject: bool = False,
    ) -> None:
        if not specs or len({fleet_shape(spec) for spec in specs}) > 1:
            raise MooringError("a fleet takes runs of one shape, and at least one: they differ in more than seeds")
        for spec in specs:
            find_method(spec.method).check_run(spec.memory, stream.scenario)
        # runs of a method are next to each other, whatever the order of the specs
        ordered = sorted(specs, key=lambda spec: (method_rank(spec.method), spec.method, spec.seed, spec.key))
        self.strength_groups = strength_groups(ordered)
        self.specs = [group[0] for group in self.strength_groups.values()]
        self.common = self.specs[0]
        self.stream, self.reject, self.device = stream, reject, torch.device(device)
        check_precision(self.common.dtype, str(self.device))
        self.dtype = parameter_dtype(self.common.dtype)
        self.like = torch.empty(0, dtype=self.dtype, device=self.device)
        self.starts = initial_networks(self.specs, stream, self.dtype, weights or {})
        with tf32_mode(self.common.dtype):
            seeds = [spec.seed for spec in self.specs]
            self.stack = Stack(self.starts, self.device, seeds, product_dtype(self.common.dtype))
        self.optimizer = make_optimizer(self.specs, self.like)
        channels_last, augmented = self.common.dtype in ("tf32", "bf16"), (self.common.flips, self.common.shifts)
        self.training_data = TrainingData(stream, self.device, self.dtype, channels_last, *augmented)
        self.passes = Passes(self.stack, self.training_data)
        self.evaluation = Evaluation(stream, self.device)
        moors_heads = stream.heads != "per task"
        self.moorable = [name for name in self.stack.parameters if moors_heads or not name.startswith("heads.")]
        self._make_plugins()
        self.recorder = GraphRecorder(
            enabled=self.compiles and self.stack.mode != "sequential" and not self.groups.draws
        )
        self.records = [RunRecord(spec) for spec in self.specs]
        self.results: list[Result] = []
        self.first: Tensors = {}
        self.position, self.steps, self.seconds = Position(), 0, 0.0
        self.loss_history, self.epoch_indices = LossHistory(len(self.specs), self.device), EpochIndices(self.device)
        self.first_bad = torch.full((len(self.specs),), NEVER, device=self.device)
        self.now = torch.zeros(1, dtype=torch.int64, device=self.device)

    def _make_plugins(self) -> None:
        """Make what takes part in every step, from the outside to the rules around the optimizer's step."""
        method = find_method(self.common.method)
        self.all_tasks, self.compiles = method.all_tasks, has_compiler(self.device)
        observer = StackObserver(self.stack, *method.observation_limits) if method.observes_layers else None
        self.groups = MethodGroups(self.specs, self.moorable, self.optimizer, observer)
        options = method.plugin or PluginOptions()
        self.learner: LearnerPlugin = options.load()(options, self.specs, self)
        self.plugins = (self.learner, RunStatistics(self.common.buffers), self.groups)

    # Through the stream

    def run(self, callback: FleetCallback | None = None) -> list[Result]:
        """Train from the present position to the end of the stream, and return a result for each run."""
        self.mark = time.perf_counter()
        with tf32_mode(self.common.dtype):
            for task in range(self.position.task, len(self.stream.tasks)):
                self._train_task(task, callback)
                if not self.specs:
                    return self.results
                self._add_seconds()
                if callback:
                    callback.on_task_end(self)
            self._finish()
        return self.results

    def _train_task(self, task: int, callback: FleetCallback | None) -> None:
        """Train a task from the present position to its end; return early if no run is left."""
        self._prepare_training(task)
        if self.position == Position(task):
            self._begin_task(task)
        for epoch in range(self.position.epoch, self.common.epochs):
            self._load_epoch(task, epoch)
            for step in range(self.position.step, len(self.epoch_indices.sizes)):
                self._iterate(task, epoch, step)
                if self.compiles and self.steps % FAILURE_CHECK_INTERVAL == 0:
                    self._remove_failed(MIN_FAILED_SHARE)
                if not self.specs:
                    return
                self._add_seconds()
                self.steps += 1
                self.position = Position(task, epoch, step + 1)
                if callback:
                    callback.on_step(self)
            for plugin in self.plugins:
                plugin.end_epoch(self)
            self.position = Position(task, epoch + 1)
        self._end_task(task)
        self.position = Position(task + 1)

    def _add_seconds(self) -> None:
        """Give each run its share of the elapsed time, including those that share the first task's run."""
        before, self.mark = self.mark, time.perf_counter()
        self.seconds += (self.mark - before) / (sum(map(len, self.strength_groups.values())) or len(self.specs))

    def _begin_task(self, task: int) -> None:
        """Start a task: its head from the one before, a new optimizer, an empty loss history."""
        if task == 0:
            for plugin in self.plugins:
                plugin.start_training(self)
            heads = evaluation_heads(self.specs, self.stream, 0, len(self.stream.tasks))
            scores = self.evaluation.score_untrained(self.stack, self.starts, heads, self.dtype, self.common.data)
            for record, accuracy in zip(self.records, scores, strict=True):
                record.untrained = accuracy
        elif self.stream.heads == "per task":
            self.stack.inherit(task, task - 1, [row for row, spec in enumerate(self.specs) if inherits_head(spec)])
        self.optimizer.start_task()
        self.loss_history.sums.zero_()

    def _prepare_training(self, task: int) -> None:
        """Choose what this task trains, and discard what was recorded before."""
        self.passes.start_task(self.stream.grown_outputs(self._last_seen(task)))
        for plugin in self.plugins:
            plugin.start_task(self, task)
        self.gradient_sharing = GradientSharing.of(self.specs if task == 0 else (), self.device)
        self.recorder.clear()

    def _load_epoch(self, task: int, epoch: int) -> None:
        """Copy the indices of the samples of this epoch to the device, including those that plugins replay."""
        order = self.training_data.epoch_order(self.specs, task, epoch)
        plan = EpochPlan(task, epoch, order, batch_sizes(order.shape[1], self.common.batch))
        for plugin in self.plugins:
            plugin.plan_epoch(self, plan)
        self.epoch_indices.load(plan.order, plan.sizes, plan.replayed, self.position.step)
        self.optimizer.plan_rates(self.specs, len(plan.sizes) * self.common.epochs)
        self.now.fill_(self.steps)
        self.task_start = self.steps - epoch * len(plan.sizes) - self.position.step

    def _iterate(self, task: int, epoch: int, step: int) -> None:
        """Take a step, eagerly or by replaying a recorded one."""
        sizes = self.epoch_indices.sizes
        size, replay_size, number = sizes[step], self.epoch_indices.replay_sizes[step], epoch * len(sizes) + step
        remaining = sizes[step:].count(size) + (self.common.epochs - epoch - 1) * sizes.count(size)
        kind = (size, replay_size, *(plugin.start_step(self, number) for plugin in self.plugins))
        self.recorder.run(kind, remaining, lambda: self._step(task, size, replay_size))
        for plugin in reversed(self.plugins):
            plugin.finish_step(self, number)

    def _step(self, task: int, size: int, replay_size: int) -> None:
        """Take one iteration of every run."""
        self.optimizer.set_step(self.now - self.task_start)
        replayed = self.epoch_indices.replay_batch(replay_size) if replay_size else None
        step = Step(self.epoch_indices.next_batch(size), replayed, task)
        self.learner.choose_batch(self, step)
        self._compute_gradients(step)
        for plugin in self.plugins:
            plugin.gradients(self, step)
        self.groups.take_step(self, step)
        for plugin in reversed(self.plugins if self.specs else ()):
            plugin.after_step(self, step)
        steps = len(self.epoch_indices.sizes) * self.common.epochs
        self.loss_history.add(self.now - self.task_start, steps, step.losses)
        self.epoch_indices.advance(size)
        self.now += 1

    def _compute_gradients(self, step: Step) -> None:
        """Compute losses, gradients, and gradients of plugins' functions of the outputs; shared where equal."""
        sharing, all_indices = self.gradient_sharing, step.indices
        with sharing.representatives_only(self.stack):
            step.indices = sharing.select(all_indices)
            logits, losses, total = self.learner.losses(self, step)
            probed = [probe for plugin in self.plugins if (probe := plugin.probe(self, logits)) is not None]
            for probe in probed:
                step.probes |= self.passes.gradients(probe, keep=True)
            gradients = self.passes.gradients(total.sum())
        step.indices, step.logits = all_indices, sharing.expand(logits.detach())
        step.losses, step.gradients = (
            sharing.expand(losses.detach()),
            {n: sharing.expand(g) for n, g in gradients.items()},
        )

    def _end_task(self, task: int) -> None:
        """End a task in all plugins, and score the tasks so far and the next one; no metric needs later ones."""
        if self.compiles:  # what overflowed in the last step is in no gradient any more
            finite = finite_runs([p.detach() for p in self.stack.parameters.values()])
            self.stop(~finite & (self.first_bad == NEVER), ago=1)
        self._remove_failed()
        for plugin in self.plugins:
            plugin.end_task(self, task)
        self.expand_strength_groups()
        for plugin in self.plugins:
            reasons = plugin.judge(self)
            if self.reject and task == 0 and any(reasons):
                self._remove(torch.tensor([reason != "" for reason in reasons]), "rejected", reasons)
        if not self.specs:
            return
        order = self.training_data.epoch_order(self.specs, task, 0)
        for plugin in self.plugins:
            plugin.remember(self, task, order)
        if task == 0:
            tensors = {**self.stack.parameters, **self.stack.buffers}
            self.first = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        means = self.loss_history.means(len(self.epoch_indices.sizes) * self.common.epochs)
        rows = self.score(task, task + 2, self._last_seen(task))
        for record, row, losses in zip(self.records, rows, means, strict=True):
            record.matrix.append(row)
            record.losses.append(losses)

    def score(self, trained: int, tasks: int, seen: int | None) -> list[list[float]]:
        """Return the test accuracy of every run on the first tasks, after it was trained on one; see `Evaluation`."""
        heads = evaluation_heads(self.specs, self.stream, trained, min(tasks, len(self.stream.tasks)))
        rows: list[list[float]] = self.evaluation.score(self.stack, heads, self.dtype, seen).tolist()
        return rows

    def _last_seen(self, task: int) -> int:
        """Return the last task whose classes have come by the end of a task."""
        return len(self.stream.tasks) - 1 if self.all_tasks else task

    def _finish(self) -> None:
        """Compare every run with its model after the first task, and make the results."""
        inputs = normalize_pixels(self.stream.test.images[self.stream.tasks[0].test[:256]], self.dtype).to(self.device)
        metrics = [row for plugin in self.plugins if (row := plugin.metrics(self))]
        drifts, ckas = drift_of(self.stack, self.first), cka_of(self.stack, self.first, inputs)
        for record, drift, cka, *others in zip(self.records, drifts, ckas, *metrics, strict=True):
            measured = {name: value for other in others for name, value in other.items()}
            self.results.append(self._result(record, "finished", "", drift=drift, cka=cka, **measured))
        self.specs, self.records = [], []

    # Which runs are in the fleet

    def stop(self, failed: Tensor, ago: int = 0) -> None:
        """Note the step in which runs failed, bool of shape (runs,), and remove them."""
        self.first_bad = torch.where(failed, self.steps - ago, self.first_bad)
        self._remove_failed()

    def _remove_failed(self, min_share: float = 0.0) -> None:
        """Remove the runs whose gradient was not finite, if they are more than this share of all."""
        steps = self.first_bad.tolist()
        if sum(step < NEVER for step in steps) > min_share * len(steps):
            task = self.position.task + 1
            reasons = [f"its gradient was not finite in step {step + 1}, in task {task}" for step in steps]
            self._remove(self.first_bad < NEVER, "unstable", reasons, steps)

    def _remove(self, removed: Tensor, status: Status, reasons: list[str], steps: list[int] | None = None) -> None:
        """Remove runs, with a result that says why, and after how many steps if that was earlier than now."""
        for row in removed.nonzero().flatten().tolist():
            result = self._result(self.records[row], status, reasons[row])
            members = self.strength_groups.pop(result.spec.key, [result.spec])
            taken = self.steps if steps is None else steps[row]
            self.results += [replace(result, spec=spec, steps=taken) for spec in members]
        self.keep((~removed).nonzero().flatten())
        self._prepare_training(self.position.task)

    def expand_strength_groups(self) -> None:
        """Give every run of a strength group a row of its own, from the one that trained the first task for all."""
        groups = [self.strength_groups.pop(spec.key, [spec]) for spec in self.specs]
        if all(len(group) == 1 for group in groups):
            return
        rows = [row for row, group in enumerate(groups) for _ in group]
        self.keep(torch.tensor(rows, device=self.device))
        self.specs = [spec for group in groups for spec in group]
        self.records = [record.for_run(spec) for record, spec in zip(self.records, self.specs, strict=True)]
        for plugin in self.plugins:
            plugin.set_strengths(self.specs)

    def keep(self, rows: Tensor) -> None:
        """Keep the runs in these rows, those of a method next to each other; a row may occur several times."""
        for part in (self.stack, self.optimizer, *self.plugins, self.epoch_indices, self.loss_history):
            part.keep(rows)
        self.first = {name: p[rows] for name, p in self.first.items()}
        self.first_bad = self.first_bad[rows]
        self.specs = [self.specs[row] for row in rows.tolist()]
        self.records = [self.records[row] for row in rows.tolist()]

    def _result(self, record: RunRecord, status: Status, reason: str, **metrics: Any) -> Result:
        software = versions(str(self.device))
        final = {"steps": self.steps, "seconds": self.seconds, "versions": software, "scenario": self.stream.scenario}
        return record.result(status, reason, **final, **metrics)
