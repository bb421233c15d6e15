"""A fleet: runs of one shape that go through one stream together, as one computation.

`Fleet.run` is the loop over tasks, epochs and steps; `Fleet._step` is one iteration of every run.
"""

import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mooring.backends.eager import has_compiler
from mooring_lab.fleet.data import EpochIndices, TrainingData
from mooring_lab.fleet.evaluation import inherits_head, last_seen
from mooring_lab.fleet.fleet_callback import FleetCallback, Position
from mooring_lab.fleet.gpu.cuda_graphs import GraphRecorder
from mooring_lab.fleet.gpu.run_kernel import NEVER
from mooring_lab.fleet.gradient_sharing import GradientSharing
from mooring_lab.fleet.grouping import groups_of_fleet
from mooring_lab.fleet.learner_plugin import EpochPlan, Step
from mooring_lab.fleet.measurements import finite_runs
from mooring_lab.fleet.passes import Passes
from mooring_lab.fleet.plugins_of_fleet import make_plugins
from mooring_lab.fleet.run_optimizers import make_optimizer
from mooring_lab.fleet.stack.stack import Stack
from mooring_lab.model.order import batch_sizes
from mooring_lab.model.precision import check_precision, parameter_dtype, product_dtype, tf32_mode
from mooring_lab.model.results import Result, Status
from mooring_lab.model.spec import RunSpec
from mooring_lab.networks.initialization import BackboneWeights, initial_networks
from mooring_lab.streams.stream import Stream

FAILURE_CHECK_INTERVAL = 50
"""The host waits for a GPU after so many steps, to see which runs failed."""

MIN_FAILED_SHARE = 0.2
"""Failed runs are removed within a task once they are more than this share: the others must then be recorded again."""


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
        self.strength_groups = groups_of_fleet(specs, stream.scenario)
        self.specs = [group[0] for group in self.strength_groups.values()]
        self.common = self.specs[0]
        self.stream, self.reject, self.device = stream, reject, torch.device(device)
        check_precision(self.common.dtype, str(self.device))
        self.dtype = parameter_dtype(self.common.dtype)
        self.like = torch.empty(0, dtype=self.dtype, device=self.device)
        starts = initial_networks(self.specs, stream, self.dtype, weights or {})
        with tf32_mode(self.common.dtype):
            seeds = [spec.seed for spec in self.specs]
            self.stack = Stack(starts, self.device, seeds, product_dtype(self.common.dtype))
        self.optimizer = make_optimizer(self.specs, self.like)
        channels_last, augmented = self.common.dtype in ("tf32", "bf16"), (self.common.flips, self.common.shifts)
        self.training_data = TrainingData(stream, self.device, self.dtype, channels_last, *augmented)
        self.passes = Passes(self.stack, self.training_data)
        moors_heads = stream.heads != "per task"
        self.moorable = [name for name in self.stack.parameters if moors_heads or not name.startswith("heads.")]
        self.plugins = make_plugins(self, starts)
        self.learner, _, self.groups, self.measured = self.plugins
        self.compiles = has_compiler(self.device)
        self.recorder = GraphRecorder(self.compiles and self.stack.mode != "sequential" and not self.groups.draws)
        self.position, self.steps, self.seconds = Position(), 0, 0.0
        self.epoch_indices = EpochIndices(self.device)
        self.first_bad = torch.full((len(self.specs),), NEVER, device=self.device)
        self.now = torch.zeros(1, dtype=torch.int64, device=self.device)

    # Through the stream

    def run(self, callback: FleetCallback | None = None) -> list[Result]:
        """Train from the present position to the end of the stream, and return a result for each run."""
        self.mark = time.perf_counter()
        with tf32_mode(self.common.dtype):
            for task in range(self.position.task, len(self.stream.tasks)):
                self._train_task(task, callback)
                if not self.specs:
                    return self.measured.results
                self._add_seconds()
                if callback:
                    callback.on_task_end(self)
            self.measured.finish(self)
            self.specs = []
        return self.measured.results

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
        elif self.stream.heads == "per task":
            self.stack.inherit(task, task - 1, [row for row, spec in enumerate(self.specs) if inherits_head(spec)])
        self.optimizer.start_task()

    def _prepare_training(self, task: int) -> None:
        """Choose what this task trains, and discard what was recorded before."""
        self.optimizer.set_decay(self.specs, task)
        self.passes.start_task(self.stream.grown_outputs(last_seen(self.common, self.stream, task)))
        for plugin in self.plugins:
            plugin.start_task(self, task)
        self.passes.sharing = GradientSharing.of(self.specs if task == 0 else (), self.device)
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
        self.passes.compute_gradients(self, step)
        for plugin in self.plugins:
            plugin.gradients(self, step)
        self.groups.take_step(self, step)
        for plugin in reversed(self.plugins if self.specs else ()):
            plugin.after_step(self, step)
        self.epoch_indices.advance(size)
        self.now += 1

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
        self.measured.end(self, removed, status, reasons, steps or [self.steps] * len(reasons))
        self.keep((~removed).nonzero().flatten())
        self._prepare_training(self.position.task)

    def expand_strength_groups(self) -> None:
        """Give every run of a strength group a row of its own, from the one that trained the first task for all."""
        groups = [self.strength_groups.pop(spec.key, [spec]) for spec in self.specs]
        if all(len(group) == 1 for group in groups):
            return
        self.keep(torch.tensor([row for row, group in enumerate(groups) for _ in group], device=self.device))
        self.specs = [spec for group in groups for spec in group]
        for plugin in self.plugins:
            plugin.set_strengths(self.specs)

    def keep(self, rows: Tensor) -> None:
        """Keep the runs in these rows, those of a method next to each other; a row may occur several times."""
        for part in (self.stack, self.optimizer, *self.plugins, self.epoch_indices):
            part.keep(rows)
        self.first_bad = self.first_bad[rows]
        self.specs = [self.specs[row] for row in rows.tolist()]
