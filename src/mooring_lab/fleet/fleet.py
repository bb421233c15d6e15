"""A fleet: runs of one shape that go through one stream together, as one computation.

`Fleet.run` is the loop over tasks, epochs and steps; `Fleet._step` is one iteration of every run, Algorithm 1.
"""

import time
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from mooring.backends.eager import has_compiler
from mooring.errors import MooringError
from mooring_lab.fleet.data import EpochIndices, TrainingData
from mooring_lab.fleet.der import DarkExperience, SlotReservoir, der_loss
from mooring_lab.fleet.evaluation import Evaluation, evaluation_heads, inherits_head
from mooring_lab.fleet.fused_step import FusedStep, run_fused_steps
from mooring_lab.fleet.gpu.cuda_graphs import GraphRecorder
from mooring_lab.fleet.gpu.run_kernel import NEVER
from mooring_lab.fleet.gradient_sharing import GradientSharing
from mooring_lab.fleet.grouping import fleet_shape, strength_groups
from mooring_lab.fleet.lwf import LearningWithoutForgetting
from mooring_lab.fleet.measurements import cka_of, drift_of, finite_runs
from mooring_lab.fleet.method_groups import MethodGroups
from mooring_lab.fleet.method_state import Tensors
from mooring_lab.fleet.record import LossHistory, RunRecord, versions
from mooring_lab.fleet.reference import Reference
from mooring_lab.fleet.reservoir import Reservoir, project_agem
from mooring_lab.fleet.run_optimizers import make_optimizer
from mooring_lab.fleet.run_projection import make_projection
from mooring_lab.fleet.run_statistics import RunStatistics
from mooring_lab.fleet.stack.stack import Stack
from mooring_lab.fleet.stack.stack_observer import StackObserver
from mooring_lab.methods import find_method
from mooring_lab.methods.registry import method_rank
from mooring_lab.model.order import batch_sizes, repeat_batches
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
        if find_method(specs[0].method).memory and specs[0].memory is None:
            raise MooringError(f"{specs[0].method} keeps samples: say how many with memory")
        for spec in specs:
            find_method(spec.method).check_scenario(stream.scenario)
        # runs of a method are next to each other, whatever the order of the specs
        ordered = sorted(specs, key=lambda spec: (method_rank(spec.method), spec.method, spec.seed, spec.key))
        self.strength_groups = strength_groups(ordered)
        self.specs = [group[0] for group in self.strength_groups.values()]
        self.common, self.method = self.specs[0], find_method(self.specs[0].method)
        self.stream, self.reject, self.device = stream, reject, torch.device(device)
        check_precision(self.common.dtype, str(self.device))
        self.dtype = parameter_dtype(self.common.dtype)
        self.starts = initial_networks(self.specs, stream, self.dtype, weights or {})
        seeds = [spec.seed for spec in self.specs]
        with tf32_mode(self.common.dtype):
            self.stack = Stack(self.starts, self.device, seeds, product_dtype(self.common.dtype))
        self.optimizer = make_optimizer(self.specs, torch.empty(0, dtype=self.dtype, device=self.device))
        channels_last, augmented = self.common.dtype in ("tf32", "bf16"), (self.common.flips, self.common.shifts)
        self.training_data = TrainingData(stream, self.device, self.dtype, channels_last, *augmented)
        self.evaluation = Evaluation(stream, self.device)
        replays = self.method.memory and self.method.data != "reference"
        reservoir = SlotReservoir if self.method.data == "der++" else Reservoir
        self.memory = self.ahead = reservoir(seeds, self.common.memory or 0) if replays else None
        outputs, like = stream.outputs, torch.empty(0, dtype=self.dtype, device=self.device)
        self.dark = DarkExperience(self.specs, outputs, like) if self.method.data == "der++" else None
        with_teacher = (self.specs, stream, self.device)
        temperature = self.method.temperature
        self.lwf = None if temperature is None else LearningWithoutForgetting(temperature, *with_teacher)
        moors_heads = stream.heads != "per task"
        names = [name for name in self.stack.parameters if moors_heads or not name.startswith("heads.")]
        self.observer = (
            StackObserver(self.stack, *self.method.observation_limits) if self.method.observes_layers else None
        )
        with_factors = self.observer.parameters if self.observer else None
        self.groups = MethodGroups(self.specs, names, self.optimizer.lr, with_factors)
        with_reference = (self.method, self.specs, self.training_data, self.groups)
        self.reference = Reference(*with_reference) if self.method.data == "reference" else None
        self.statistics = RunStatistics(self.stack, self.common.buffers)
        self.projection = make_projection(self.method, self.specs, self.stack, names)
        self.fused = [FusedStep(state, self.optimizer) for _, state in self.groups.groups if has_compiler(self.device)]
        draws = any(state.importance.draws for _, state in self.groups.moored) and self.method.observes_outputs
        self.recorder = GraphRecorder(enabled=bool(self.fused) and self.stack.mode != "sequential" and not draws)
        self.records = [RunRecord(spec) for spec in self.specs]
        self.results: list[Result] = []
        self.first: Tensors = {}
        self.position, self.steps, self.seconds = Position(), 0, 0.0
        self.loss_history, self.epoch_indices = LossHistory(len(self.specs), self.device), EpochIndices(self.device)
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
                if self.fused and self.steps % FAILURE_CHECK_INTERVAL == 0:
                    self._remove_failed(MIN_FAILED_SHARE)
                if not self.specs:
                    return
                self._add_seconds()
                self.steps += 1
                self.position = Position(task, epoch, step + 1)
                if callback:
                    callback.on_step(self)
            self.memory = self.ahead
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
            self.groups.consolidate(self.stack.parameters, "start")
            heads = evaluation_heads(self.specs, self.stream, 0, len(self.stream.tasks))
            scores = self.evaluation.score_untrained(self.stack, self.starts, heads, self.dtype, self.common.data)
            for record, accuracy in zip(self.records, scores, strict=True):
                record.untrained = accuracy
        elif self.stream.heads == "per task":
            self.stack.inherit(task, task - 1, [row for row, spec in enumerate(self.specs) if inherits_head(spec)])
        self.optimizer.start_task()
        self.loss_history.sums.zero_()

    def _prepare_training(self, task: int) -> None:
        """Choose the parameters and outputs that this task trains, and discard what was recorded before."""
        self.outputs = self.stream.grown_outputs(self._last_seen(task))
        self.groups.set_outputs(self.outputs)
        self.statistics.start_task(task)
        self.frozen = self.method.frozen == "always" or (self.method.frozen == "after first" and task > 0)
        for name, p in self.stack.parameters.items():
            p.requires_grad_(not (self.frozen and name.startswith("backbone.")))
        if self.lwf is not None:
            self.lwf.start_task(task)
        self.gradient_sharing = GradientSharing.of(self.specs if task == 0 else (), self.device)
        self.recorder.clear()
        self.kernels_are_compiled = False
        for fused in self.fused:
            fused.counts = {}  # the device's counters start from the host's again

    def _load_epoch(self, task: int, epoch: int) -> None:
        """Copy the indices of the samples of this epoch to the device, including those replayed from memory."""
        order = self.training_data.epoch_order(self.specs, self.method.data, task, epoch)
        sizes = batch_sizes(order.shape[1], self.common.batch)
        replayed: list[Tensor] = []
        if self.memory is not None:
            self.ahead, offers = deepcopy(self.memory), epoch == 0 and not self.method.stores_after_tasks
            count, updates = self.method.recalls, self.method.updates
            if isinstance(self.ahead, SlotReservoir):
                replayed = self.ahead.plan_slots(order, sizes, count)
            else:
                replayed = self.ahead.plan(order, sizes, offer=offers, count=count, updates=updates)
        elif self.reference is not None and self.reference.distillation:
            steps = len(sizes) * self.method.updates
            replayed = self.reference.distillation.plan(len(self.specs), epoch * steps, steps)
        if self.method.updates > 1:
            order, sizes = repeat_batches(order, sizes, self.method.updates)
        self.epoch_indices.load(order, sizes, replayed, self.position.step)
        self.optimizer.plan_rates(self.specs, len(sizes) * self.common.epochs)
        self.now.fill_(self.steps)
        self.task_start = self.steps - epoch * len(sizes) - self.position.step

    def _iterate(self, task: int, epoch: int, step: int) -> None:
        """Take a step, eagerly or by replaying a recorded one."""
        sizes = self.epoch_indices.sizes
        size, replay_size = sizes[step], self.epoch_indices.replay_sizes[step]
        remaining = sizes[step:].count(size) + (self.common.epochs - epoch - 1) * sizes.count(size)
        observes = self.observer is not None and self.observer.start_step(epoch * len(sizes) + step)
        kind = (size, replay_size, observes, *(fused.pulls for fused in self.fused))
        self.recorder.run(kind, remaining, lambda: self._step(task, size, replay_size))
        if observes:
            self.groups.count_factors()
        for fused in self.fused:
            fused.count_step()
        if self.reference is not None and self.reference.budgets:
            self.reference.budgets.after_step(self.stack, epoch * len(sizes) + step + 1)

    def _step(self, task: int, size: int, replay_size: int) -> None:
        """Take one iteration of every run: gradient, penalty, step, importance, pull (Algorithm 1)."""
        self.optimizer.set_step(self.now - self.task_start)
        indices = self.epoch_indices.next_batch(size)
        replayed = self.epoch_indices.replay_batch(replay_size) if replay_size else None
        if replayed is not None and self.method.data == "er":
            indices = torch.cat([indices, replayed], 1)
        head_task = None if self.method.data in ("joint", "er") else task
        if self.dark is not None and replayed is not None:
            loss, gradients, probes = self._replay_outputs(self.dark, indices, replayed, task)
        else:
            loss, gradients, probes = self._compute_gradients(indices, head_task)
        if replayed is not None and self.method.data == "a-gem":
            gradients = project_agem(gradients, self._gradients(self._forward(replayed, None)[1].sum()))
        if self.projection is not None:
            gradients = self.projection.project_gradients(gradients)
        added: Tensors = {}
        if replayed is not None and self.reference is not None:
            added = self._distilled(self.reference, replayed[0], gradients)
            if not self.method.measures:  # one loss of both
                gradients, added = {**added, **{n: g + added[n] if n in added else g for n, g in gradients.items()}}, {}
        finite = self._update(gradients, probes, added, indices.shape[1])
        if self.projection is not None and self.specs:
            seen = indices if replayed is None else torch.cat([indices, replayed], 1)
            seen = seen if finite is None else seen[finite]
            self.projection.project_parameters(self.stack.parameters, lambda: self._validation_gradients(seen))
        if self.observer is not None and self.observer.enabled:
            self.groups.accumulate_factors(self.observer.take(), finite)
        loss = loss if finite is None else loss[finite]
        self.loss_history.add(self.now - self.task_start, len(self.epoch_indices.sizes) * self.common.epochs, loss)
        self.epoch_indices.advance(size)
        self.now += 1

    def _update(self, gradients: Tensors, probes: Tensors, added: Tensors, samples: int) -> Tensor | None:
        """Apply penalty, step, importance and pull; return which runs are finite if some were removed."""
        if self.fused:
            args = self.stack.parameters, gradients, probes, added, samples, self.first_bad, self.now
            run_fused_steps(self.fused, self.groups, *args, new=not self.kernels_are_compiled)
            self.kernels_are_compiled = True
            return None
        penalized = self.groups.penalized_gradients(self.stack.parameters, gradients)
        penalized |= {name: penalized[name] + g for name, g in added.items()}
        finite = finite_runs([*penalized.values(), *probes.values()])
        failed = not bool(finite.all())
        if failed:
            self.first_bad = torch.where(finite, self.first_bad, self.steps)
            self._remove_failed()
            gradients, penalized, probes = (
                {name: tensor[finite] for name, tensor in tensors.items()} for tensors in (gradients, penalized, probes)
            )
        self.groups.step(self.stack.parameters, gradients, penalized, probes, samples, self.optimizer)
        return finite if failed else None

    def _remove_failed(self, min_share: float = 0.0) -> None:
        """Remove the runs whose gradient was not finite, if they are more than this share of all."""
        steps = self.first_bad.tolist()
        if sum(step < NEVER for step in steps) > min_share * len(steps):
            task = self.position.task + 1
            reasons = [f"its gradient was not finite in step {step + 1}, in task {task}" for step in steps]
            self._remove(self.first_bad < NEVER, "unstable", reasons, steps)

    def _end_task(self, task: int) -> None:
        """Consolidate, check stability, and score the tasks so far and the next one; no metric needs later ones."""
        if self.fused:  # a penalty that overflowed in the last step is in no gradient any more
            finite = finite_runs([p.detach() for p in self.stack.parameters.values()])
            self.first_bad = torch.where(finite | (self.first_bad < NEVER), self.first_bad, self.steps - 1)
        self._remove_failed()
        if self.reference is not None and self.reference.budgets:
            self.reference.budgets.finish(self.stack)
        self.statistics.merge(self.groups)
        self.groups.consolidate(self.stack.parameters)
        self.expand_strength_groups()
        self.statistics.end_task()
        extrapolates = self.groups.record_stability(self.records, self.optimizer)
        if self.reject and task == 0 and bool(extrapolates.any()):
            warnings = [record.stability[-1].warning if record.stability else "" for record in self.records]
            self._remove(extrapolates, "rejected", warnings)
        if not self.specs:
            return
        if self.memory is not None and self.method.stores_after_tasks:
            self.memory.offer(self.training_data.epoch_order(self.specs, "task", task, 0))
        if self.reference is not None and task + 1 < len(self.stream.tasks):
            self.reference.start_task(self.training_data.epoch_order(self.specs, "task", task, 0), self.stack)
        if self.lwf is not None:
            self.lwf.remember(self.stack)
        if self.projection is not None and task + 1 < len(self.stream.tasks):
            order = self.training_data.epoch_order(self.specs, "task", task, 0)
            self.projection.end_task(self.stack, self.training_data, order, task)
        if task == 0:
            tensors = {**self.stack.parameters, **self.stack.buffers}
            self.first = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        steps = len(self.epoch_indices.sizes) * self.common.epochs
        heads = evaluation_heads(self.specs, self.stream, task, min(task + 2, len(self.stream.tasks)))
        rows = self.evaluation.score(self.stack, heads, self.dtype, self._last_seen(task)).tolist()
        for record, row, losses in zip(self.records, rows, self.loss_history.means(steps), strict=True):
            record.matrix.append(row)
            record.losses.append(losses)

    def _last_seen(self, task: int) -> int:
        """Return the last task whose classes have come by the end of a task; joint training has all of them."""
        return len(self.stream.tasks) - 1 if self.method.data == "joint" else task

    def _finish(self) -> None:
        """Compare every run with its model after the first task, and make the results."""
        inputs = normalize_pixels(self.stream.test.images[self.stream.tasks[0].test[:256]], self.dtype).to(self.device)
        importances = self.groups.importance_by_layer()
        drifts, ckas = drift_of(self.stack, self.first), cka_of(self.stack, self.first, inputs)
        layers = zip(self.records, importances, drifts, ckas, self._joint_accuracies(), strict=True)
        for record, importance, drift, cka, joint in layers:
            measured = {"importance": importance, "drift": drift, "cka": cka}
            self.results.append(self._result(record, "finished", "", **measured, joint=joint))
        self.specs, self.records = [], []

    def _joint_accuracies(self) -> list[list[float]]:
        """Return `Result.joint` of each run."""
        if self.method.data != "joint":
            return [[] for _ in self.records]
        if self.stream.heads != "growing":
            return [record.matrix[-1] for record in self.records]
        heads = evaluation_heads(self.specs, self.stream, len(self.stream.tasks) - 1, len(self.stream.tasks))
        accuracies: list[list[float]] = self.evaluation.score(self.stack, heads, self.dtype).tolist()
        return accuracies

    # The gradient

    def _compute_gradients(self, indices: Tensor, task: int | None) -> tuple[Tensor, Tensors, Tensors]:
        """Return losses, gradients, and gradients of the importances' functions of the outputs; shared where equal."""
        if self.lwf is not None and self.lwf.old_heads:
            loss, added = self.lwf.losses(self.stack, self.training_data.batch(indices, task))
            return loss.detach(), self._gradients((loss + added).sum()), {}
        with self.gradient_sharing.representatives_only(self.stack):
            logits, loss = self._forward(self.gradient_sharing.select(indices), task)
            probes: Tensors = {}
            if self.method.observes_outputs:
                probes = self._gradients(self.groups.probe(logits, self.stack.seeds, self.steps), keep=True)
            gradients = self._gradients(loss.sum())
        expand = self.gradient_sharing.expand
        return expand(loss.detach()), {name: expand(g) for name, g in gradients.items()}, probes

    def _replay_outputs(
        self, dark: DarkExperience, indices: Tensor, planned: Tensor, task: int
    ) -> tuple[Tensor, Tensors, Tensors]:
        """Return losses and gradients of DER++, and store the batch's outputs; `planned` is of `plan_slots`."""
        drawn = (planned.shape[1] - indices.shape[1]) // 3
        first, second, slots, places = torch.split(planned, [drawn, drawn, drawn, indices.shape[1]], 1)
        logits, loss = self._forward(indices, task)
        total = loss
        if drawn:
            replayed, label_loss = self._forward(first, None)[0], self._forward(second, None)[1]
            total = loss + der_loss(replayed, dark.stored(slots), label_loss, dark.alpha)
        gradients = self._gradients(total.sum())
        dark.store(places, logits)
        return loss.detach(), gradients, {}

    def _forward(self, indices: Tensor, task: int | None) -> tuple[Tensor, Tensor]:
        """Return logits (runs, batch, outputs) and each run's mean loss, of one task's head or of each sample's own."""
        batch = self.training_data.batch(indices, task)
        logits = self.stack(batch.x, batch.head, train=not self.frozen)
        if self.outputs < self.stream.outputs:  # the classes that have come so far
            logits = logits[..., : self.outputs]
        losses = cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none")
        return logits, losses.view_as(indices).mean(1)

    def _validation_gradients(self, indices: Tensor) -> Tensors:
        """Return the gradients of each run's mean loss in evaluation mode, each sample by its own task's head."""
        batch = self.training_data.batch(indices, None)
        logits = self.stack(batch.x, batch.head)[..., : self.outputs]  # of the classes that have come so far
        losses = cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none")
        return self._gradients(losses.view_as(indices).mean(1).sum())

    def _distilled(self, reference: Reference, samples: Tensor, gradients: Tensors) -> Tensors:
        """Return what distillation adds to the task's gradients; its own pass is not observed."""
        assert reference.distillation is not None
        observes = self.observer is not None and self.observer.enabled
        if self.observer is not None:
            self.observer.enabled = False
        divergence = reference.distillation.samples.divergence(self.stack, samples)
        own = self._gradients(divergence.double().mean(1).sum())
        if self.observer is not None:
            self.observer.enabled = observes
        return reference.distillation.weighted(own, gradients, self.groups.names)

    def _gradients(self, loss: Tensor, keep: bool = False) -> Tensors:
        """Return the gradient of each parameter that the loss depends on."""
        trained = {name: p for name, p in self.stack.parameters.items() if p.requires_grad}
        gradients = torch.autograd.grad(loss, list(trained.values()), retain_graph=keep, allow_unused=True)
        return {name: g for name, g in zip(trained, gradients, strict=True) if g is not None}

    # Which runs are in the fleet

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
        self.groups.set_strengths(self.specs)
        if self.reference is not None and self.reference.distillation:
            self.reference.distillation.set_strengths(self.specs)
        if self.lwf is not None:
            self.lwf.set_strengths(self.specs)
        if self.projection is not None:
            self.projection.set_strengths(self.specs)

    def keep(self, rows: Tensor) -> None:
        """Keep the runs in these rows, those of a method next to each other; a row may occur several times."""
        remaining = self.groups.select_runs(rows.cpu())
        self.fused = [self.fused[number] for number in remaining if self.fused]
        self.stack.keep(rows)
        self.statistics.keep(rows)
        self.optimizer.keep(rows)
        self.groups.set_learning_rates(self.optimizer.lr)
        for memory in {id(m): m for m in (self.memory, self.ahead) if m is not None}.values():
            memory.keep(rows)
        for part in (self.reference, self.dark, self.lwf):
            if part is not None:
                part.keep(rows)
        self.epoch_indices.keep(rows)
        self.first = {name: p[rows] for name, p in self.first.items()}
        self.loss_history.keep(rows)
        self.first_bad = self.first_bad[rows]
        self.specs = [self.specs[row] for row in rows.tolist()]
        self.records = [self.records[row] for row in rows.tolist()]
        if self.projection is not None:
            self.projection.keep(rows)
            self.projection.set_strengths(self.specs)

    def _result(self, record: RunRecord, status: Status, reason: str, **metrics: Any) -> Result:
        software = versions(str(self.device))
        final = {"steps": self.steps, "seconds": self.seconds, "versions": software, "scenario": self.stream.scenario}
        return record.result(status, reason, **final, **metrics)
