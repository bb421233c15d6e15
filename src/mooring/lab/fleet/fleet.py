"""A fleet: runs of one shape that go through one stream together. Start with `Fleet._step`."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from mooring.errors import MooringError
from mooring.lab.fleet.data import TrainingData
from mooring.lab.fleet.epoch_indices import EpochIndices
from mooring.lab.fleet.evaluation import Evaluation
from mooring.lab.fleet.fused_step import advance_all, fused_for
from mooring.lab.fleet.gpu.cuda_graphs import GraphRecorder
from mooring.lab.fleet.gpu.run_kernel import NEVER
from mooring.lab.fleet.gradient_sharing import GradientSharing
from mooring.lab.fleet.grouping import fleet_shape, strength_groups
from mooring.lab.fleet.heads import evaluation_heads, inherit_heads
from mooring.lab.fleet.loss_history import LossHistory
from mooring.lab.fleet.measurements import cka_of, drift_of, finite_runs
from mooring.lab.fleet.method_groups import Groups
from mooring.lab.fleet.method_state import Tensors
from mooring.lab.fleet.position import Position
from mooring.lab.fleet.record import RunRecord, versions
from mooring.lab.fleet.reservoir import Reservoir, project_agem
from mooring.lab.fleet.sgd import SGD
from mooring.lab.fleet.stack.stack import Stack
from mooring.lab.fleet.stack.stack_observer import StackObserver
from mooring.lab.methods import find_method
from mooring.lab.methods.registry import method_rank
from mooring.lab.model.order import batch_sizes
from mooring.lab.model.precision import check_precision, parameter_dtype, product_dtype, tf32_mode
from mooring.lab.model.results import Result, Status
from mooring.lab.model.spec import RunSpec
from mooring.lab.networks.initialization import BackboneWeights, initial_networks
from mooring.lab.networks.inputs import normalize_pixels
from mooring.lab.streams.stream import Stream

__all__ = ["Fleet", "FleetCallback", "Position"]

LOOK = 50
"""After so many steps a GPU is waited for, to see which runs are lost."""

MANY = 0.2
"""What part of a stack must be lost for them to be taken out at once: the rest has to be recorded anew."""


class FleetCallback(Protocol):
    """A callback that follows a fleet."""

    def on_step(self, fleet: "Fleet") -> None:
        """Run between two steps; may save the fleet, or raise to stop it."""

    def on_task_end(self, fleet: "Fleet") -> None:
        """Run after each task."""


class Fleet:
    """Several runs, each with its own seed, start, data order, learning rate and strength, as one computation.

    What becomes of a run depends on its own spec alone. A run whose gradient is not finite is stopped before the step,
    marked unstable and taken out; the others go on.

    Args:
        specs: the runs; of one shape.
        stream: what they go through.
        device: where to compute.
        weights: what backbones start from, by fingerprint.
        reject: take runs out after the first task whose penalty does not interpolate everywhere.

    Example:
        >>> from mooring.lab.streams import by_class, digits
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
        if any(spec.schedule != "constant" and find_method(spec.method).importance is not None for spec in specs):
            raise MooringError("a schedule is for methods that pull nothing, such as plain: give schedule='constant'")
        # runs of a method are neighbours, and the order given does not matter
        self.strength_groups = strength_groups(
            sorted(specs, key=lambda spec: (method_rank(spec.method), spec.seed, spec.key))
        )
        self.specs = [some[0] for some in self.strength_groups.values()]
        self.common, self.method = self.specs[0], find_method(self.specs[0].method)
        self.stream, self.reject, self.device = stream, reject, torch.device(device)
        check_precision(self.common.dtype, str(self.device))
        self.dtype = parameter_dtype(self.common.dtype)
        self.starts = initial_networks(self.specs, stream, self.dtype, weights or {})
        seeds = [spec.seed for spec in self.specs]
        with tf32_mode(self.common.dtype):
            self.stack = Stack(self.starts, self.device, seeds, product_dtype(self.common.dtype))
        self.sgd = SGD.of(self.specs, torch.empty(0, dtype=self.dtype, device=self.device))
        channels_last, augmented = self.common.dtype in ("tf32", "bf16"), (self.common.flips, self.common.shifts)
        self.training_data = TrainingData(stream, self.device, self.dtype, channels_last, *augmented)
        self.evaluation = Evaluation(stream, self.device)
        self.memory = self.ahead = Reservoir(seeds, self.common.memory or 0) if self.method.memory else None
        names = [name for name in self.stack.parameters if stream.heads == "one" or not name.startswith("heads.")]
        self.observer = (
            StackObserver(self.stack, *self.method.observation_limits) if self.method.observes_layers else None
        )
        self.groups = Groups(self.specs, names, self.sgd.lr, self.observer.parameters if self.observer else ())
        self.fused = fused_for(self.groups, self.sgd)
        drawing = any(moorings.importance.draws for _, moorings in self.groups.moored) and self.method.observes_outputs
        self.recorder = GraphRecorder(enabled=bool(self.fused) and self.stack.mode != "sequential" and not drawing)
        self.records = [RunRecord(spec) for spec in self.specs]
        self.results: list[Result] = []
        self.first: Tensors = {}
        self.position, self.steps, self.seconds = Position(), 0, 0.0
        self.loss_history, self.epoch_indices = LossHistory(len(self.specs), self.device), EpochIndices(self.device)
        self.bad = torch.full((len(self.specs),), NEVER, device=self.device)
        self.now = torch.zeros(1, dtype=torch.int64, device=self.device)

    # Through the stream

    def run(self, callback: FleetCallback | None = None) -> list[Result]:
        """Go on from where the fleet is to the end of the stream; a result for each run."""
        self.mark = time.perf_counter()
        with tf32_mode(self.common.dtype):
            return self._run(callback)

    def _run(self, callback: FleetCallback | None) -> list[Result]:
        for task in range(self.position.task, len(self.stream.tasks)):
            if self.position == Position(task):
                self._begin(task)
            self._train_what(task)
            for epoch in range(self.position.epoch, self.common.epochs):
                self._lay_out(task, epoch)
                for step in range(self.position.step, len(self.epoch_indices.sizes)):
                    self._iterate(task, epoch, step)
                    if self.fused and self.steps % LOOK == 0:
                        self._lose_bad(MANY)
                    if not self.specs:
                        return self.results
                    self._tick()
                    self.steps += 1
                    self.position = Position(task, epoch, step + 1)
                    if callback:
                        callback.on_step(self)
                self.memory = self.ahead
                self.position = Position(task, epoch + 1)
            self._end(task)
            self.position = Position(task + 1)
            if not self.specs:
                return self.results
            self._tick()
            if callback:
                callback.on_task_end(self)
        self._finish()
        return self.results

    def _tick(self) -> None:
        """Give each run its share of the time that has passed, a twin that waits included."""
        before, self.mark = self.mark, time.perf_counter()
        self.seconds += (self.mark - before) / (sum(map(len, self.strength_groups.values())) or len(self.specs))

    def _begin(self, task: int) -> None:
        """A task starts: its head from the one before, no velocity, an empty curve."""
        if task == 0:
            self.groups.set_out(self.stack.parameters)
            heads = evaluation_heads(self.specs, self.stream, 0, len(self.stream.tasks))
            scores = self.evaluation.score_untrained(self.stack, self.starts, heads, self.dtype, self.common.data)
            for record, accuracy in zip(self.records, scores, strict=True):
                record.untrained = accuracy
        else:
            inherit_heads(self.stack, self.specs, self.stream, task)
        self.sgd.reset()
        self.loss_history.reset()

    def _train_what(self, task: int) -> None:
        """Ask for gradients where this task has any to give."""
        self.still = self.method.frozen == "always" or (self.method.frozen == "after first" and task > 0)
        for name, p in self.stack.parameters.items():
            p.requires_grad_(not (self.still and name.startswith("backbone.")))
        self.gradient_sharing = GradientSharing.of(self.specs if task == 0 else (), self.device)
        self.recorder.clear()
        self.rehearsed = False
        for fused in self.fused:
            fused.forget()

    def _lay_out(self, task: int, epoch: int) -> None:
        """Put what every run sees in this epoch on the device, what it draws from memory included."""
        order = self.training_data.epoch_order(self.specs, self.method.data, task, epoch)
        sizes = batch_sizes(order.shape[1], self.common.batch)
        remembered: list[Tensor] = []
        if self.memory is not None:
            self.ahead = self.memory.copy()
            offers, recalls = self.method.data == "er" and epoch == 0, self.method.recalls
            remembered = self.ahead.plan(order, sizes, offer=offers, count=recalls)
        self.epoch_indices.load(order, sizes, remembered, self.position.step)
        self.sgd.set_epoch(self.specs, epoch)
        self.now.fill_(self.steps)
        self.began = self.steps - epoch * len(sizes) - self.position.step

    def _iterate(self, task: int, epoch: int, step: int) -> None:
        """Take a step, as told or as recorded."""
        sizes, size, drawn = (
            self.epoch_indices.sizes,
            self.epoch_indices.sizes[step],
            self.epoch_indices.replay_sizes[step],
        )
        left = sizes[step:].count(size) + (self.common.epochs - epoch - 1) * sizes.count(size)
        looks = self.observer is not None and self.observer.start_step(epoch * len(sizes) + step)
        kind = (size, drawn, looks, *(fused.pulling for fused in self.fused))
        self.recorder.run(kind, left, lambda: self._step(task, size, drawn))
        if looks:
            self.groups.looked()
        for each in self.fused:
            each.tick()

    def _step(self, task: int, size: int, drawn: int) -> None:
        """One iteration of every run: gradient, penalty, step, importance, pull (Algorithm 1)."""
        indices = self.epoch_indices.next_batch(size)
        remembered = self.epoch_indices.replay_batch(drawn) if drawn else None
        if remembered is not None and self.method.data == "er":
            indices = torch.cat([indices, remembered], 1)
        loss, gradients, probes = self._learn(indices, None if self.method.data in ("joint", "er") else task)
        if remembered is not None and self.method.data == "a-gem":
            gradients = project_agem(gradients, self._gradients(self._forward(remembered, None)[1].sum()))
        fine = self._move(gradients, probes, indices.shape[1])
        if self.observer is not None and self.observer.enabled:
            self.groups.look(self.observer.take(), fine)
        loss = loss if fine is None else loss[fine]
        self.loss_history.add(self.now - self.began, len(self.epoch_indices.sizes) * self.common.epochs, loss)
        self.epoch_indices.advance(size)
        self.now += 1

    def _move(self, gradients: Tensors, probes: Tensors, samples: int) -> Tensor | None:
        """Penalty, step, importance and pull; says which runs are left where some were lost."""
        if self.fused:
            told = self.stack.parameters, gradients, probes, samples, self.bad, self.now
            advance_all(self.fused, self.groups, *told, rehearse=not self.rehearsed)
            self.rehearsed = True
            return None
        loaded = self.groups.penalized(self.stack.parameters, gradients)
        fine = finite_runs([*loaded.values(), *probes.values()])
        lost = not bool(fine.all())
        if lost:
            self.bad = torch.where(fine, self.bad, self.steps)
            self._lose_bad()
            gradients, loaded, probes = ({n: t[fine] for n, t in told.items()} for told in (gradients, loaded, probes))
        self.groups.advance(self.stack.parameters, gradients, loaded, probes, samples, self.sgd)
        return fine if lost else None

    def _lose_bad(self, part: float = 0.0) -> None:
        """Take out the runs whose gradient was not finite, if they are more than this part of all."""
        steps = self.bad.tolist()
        if sum(at < NEVER for at in steps) > part * len(steps):
            where = [f"its gradient was not finite in step {at + 1}, in task {self.position.task + 1}" for at in steps]
            self._lose(self.bad < NEVER, "unstable", where, steps)

    def _end(self, task: int) -> None:
        """A task is over: consolidate, judge, and score the tasks so far and the next: no metric looks further."""
        if self.fused:  # a penalty that overflowed in the last step shows in no gradient any more
            fine = finite_runs([p.detach() for p in self.stack.parameters.values()])
            self.bad = torch.where(fine | (self.bad < NEVER), self.bad, self.steps - 1)
        self._lose_bad()
        self.groups.consolidate(self.stack.parameters)
        self.board()
        self._judge(task)
        if not self.specs:
            return
        if self.memory is not None and self.method.data == "a-gem":
            self.memory.offer(self.training_data.epoch_order(self.specs, "task", task, 0))
        if task == 0:
            now = {**self.stack.parameters, **self.stack.buffers}
            self.first = {name: tensor.detach().clone() for name, tensor in now.items()}
        steps = len(batch_sizes(len(self.stream.tasks[task].train), self.common.batch)) * self.common.epochs
        heads = evaluation_heads(self.specs, self.stream, task, min(task + 2, len(self.stream.tasks)))
        rows = self.evaluation.score(self.stack, heads, self.dtype).tolist()
        for record, row, losses in zip(self.records, rows, self.loss_history.means(steps), strict=True):
            record.matrix.append(row)
            record.losses.append(losses)

    def _judge(self, task: int) -> None:
        """Write down what each penalty will do, and reject those that do not interpolate."""
        too_strong = self.groups.judge(self.records)
        if self.reject and task == 0 and bool(too_strong.any()):
            self._lose(too_strong, "rejected", [record.warning for record in self.records])

    def _finish(self) -> None:
        """The stream is over: measure what is left of the first task's model, run by run."""
        inputs = normalize_pixels(self.stream.test.images[self.stream.tasks[0].test[:256]], self.dtype).to(self.device)
        drifts, likenesses = drift_of(self.stack, self.first), cka_of(self.stack, self.first, inputs)
        for record, *told in zip(self.records, self.groups.importance_by_layer(), drifts, likenesses, strict=True):
            rest = dict(zip(("importance", "drift", "cka"), told, strict=True))
            self.results.append(self._result(record, "finished", "", **rest))
        self.specs, self.records = [], []

    # Pieces of a step

    def _learn(self, indices: Tensor, task: int | None) -> tuple[Tensor, Tensors, Tensors]:
        """Losses, gradients, and gradients of what importances ask of the outputs; once for runs that are alike."""
        with self.gradient_sharing.representatives_only(self.stack):
            logits, loss = self._forward(self.gradient_sharing.select(indices), task)
            probes: Tensors = {}
            if self.method.observes_outputs:
                probes = self._gradients(self.groups.asked(logits, self.stack.seeds, self.steps), keep=True)
            gradients = self._gradients(loss.sum())
        every = self.gradient_sharing.expand
        return every(loss.detach()), {name: every(g) for name, g in gradients.items()}, probes

    def _forward(self, indices: Tensor, task: int | None) -> tuple[Tensor, Tensor]:
        """Logits (runs, batch, outputs) and the mean loss of each run; of one task's head, or of each sample's own."""
        batch = self.training_data.batch(indices, task)
        logits = self.stack(batch.x, batch.head, train=not self.still)
        losses = cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none")
        return logits, losses.view_as(indices).mean(1)

    def _gradients(self, loss: Tensor, keep: bool = False) -> Tensors:
        """The gradient of each parameter that the loss depends on."""
        wanted = {name: p for name, p in self.stack.parameters.items() if p.requires_grad}
        found = torch.autograd.grad(loss, list(wanted.values()), retain_graph=keep, allow_unused=True)
        return {name: g for name, g in zip(wanted, found, strict=True) if g is not None}

    # Runs come and go

    def _lose(self, lost: Tensor, status: Status, reasons: list[str], steps: list[int] | None = None) -> None:
        """Take runs out, with a result that says why, and after how many steps where that was earlier than now."""
        for row in lost.nonzero().flatten().tolist():
            result = self._result(self.records[row], status, reasons[row])
            result = result if steps is None else replace(result, steps=steps[row])
            self.results += [
                replace(result, spec=spec) for spec in self.strength_groups.pop(result.spec.key, [result.spec])
            ]
        self.keep((~lost).nonzero().flatten())
        self._train_what(self.position.task)

    def board(self) -> None:
        """Twins go on from where one of them has come for all."""
        every = [self.strength_groups.pop(spec.key, [spec]) for spec in self.specs]
        if all(len(some) == 1 for some in every):
            return
        rows = [row for row, some in enumerate(every) for _ in some]
        self.keep(torch.tensor(rows, device=self.device))
        self.specs = [spec for some in every for spec in some]
        self.records = [record.for_run(spec) for record, spec in zip(self.records, self.specs, strict=True)]
        self.groups.strengthen(self.specs)

    def keep(self, rows: Tensor) -> None:
        """Go on with the runs in these rows, those of a method next to each other; a row may come several times."""
        left = self.groups.keep(rows.cpu())
        self.fused = [self.fused[number] for number in left if self.fused]
        self.stack.keep(rows)
        self.sgd.keep(rows)
        for memory in {id(each): each for each in (self.memory, self.ahead) if each is not None}.values():
            memory.keep(rows)
        self.epoch_indices.keep(rows)
        self.first = {name: p[rows] for name, p in self.first.items()}
        self.loss_history.keep(rows)
        self.bad = self.bad[rows]
        self.specs = [self.specs[row] for row in rows.tolist()]
        self.records = [self.records[row] for row in rows.tolist()]

    def _result(self, record: RunRecord, status: Status, reason: str, **rest: dict[str, float]) -> Result:
        where = versions(str(self.device))
        return record.result(status, reason, steps=self.steps, seconds=self.seconds, versions=where, **rest)
