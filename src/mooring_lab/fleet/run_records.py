"""What is measured of the runs of a fleet: accuracies, losses and the distance from the first task's model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mooring_lab.fleet.evaluation import Evaluation, evaluation_heads, last_seen
from mooring_lab.fleet.learner_plugin import LearnerPlugin, PluginState, Step, Tensors
from mooring_lab.fleet.measurements import cka_of, drift_of
from mooring_lab.fleet.record import LossHistory, RunRecord, versions
from mooring_lab.fleet.stack.stack import to_stack_layout
from mooring_lab.model.results import Result, Status
from mooring_lab.model.spec import RunSpec
from mooring_lab.networks.inputs import normalize_pixels
from mooring_lab.networks.multi_head import MultiHeadNetwork
from mooring_lab.streams.stream import Stream

if TYPE_CHECKING:
    from mooring_lab.fleet.fleet import Fleet

COMPARED_INPUTS = 256
"""The number of test images of the first task on which CKA is measured."""


class RunRecords(LearnerPlugin):
    """The records of the present runs, and the results of those that have ended.

    Args:
        specs: the runs.
        starts: the initial network of each run.
        stream: the tasks.
        device: of the runs.

    Attributes:
        records: of the runs, by row.
        results: of runs that were removed or have finished.
        first: parameters and buffers after the first task, by name.
        loss_history: of the present task.
    """

    key = "records"

    def __init__(
        self, specs: Sequence[RunSpec], starts: Sequence[MultiHeadNetwork], stream: Stream, device: torch.device
    ) -> None:
        self.starts, self.evaluation = starts, Evaluation(stream, device)
        self.records = [RunRecord(spec) for spec in specs]
        self.results: list[Result] = []
        self.first: Tensors = {}
        self.loss_history = LossHistory(len(specs), device)

    def start_training(self, fleet: Fleet) -> None:
        """Score the untrained networks on all tasks."""
        heads = evaluation_heads(fleet.specs, fleet.stream, 0, len(fleet.stream.tasks))
        scores = self.evaluation.score_untrained(fleet.stack, self.starts, heads, fleet.dtype, fleet.common.data)
        for record, accuracy in zip(self.records, scores, strict=True):
            record.untrained = accuracy

    def after_step(self, fleet: Fleet, step: Step) -> None:
        """Add the losses of a step."""
        steps = len(fleet.epoch_indices.sizes) * fleet.common.epochs
        self.loss_history.add(fleet.now - fleet.task_start, steps, step.losses)

    def remember(self, fleet: Fleet, task: int, order: Tensor) -> None:
        """Score the tasks so far and the next one, because no metric needs later ones; keep the first task's model."""
        if task == 0:
            tensors = {**fleet.stack.parameters, **fleet.stack.buffers}
            self.first = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        means = self.loss_history.means(len(fleet.epoch_indices.sizes) * fleet.common.epochs)
        with fleet.learner.scoring(fleet, task):
            rows = self.score(fleet, task, task + 2, last_seen(fleet.common, fleet.stream, task))
        for record, row, losses in zip(self.records, rows, means, strict=True):
            record.matrix.append(row)
            record.losses.append(losses)
        self.loss_history.sums.zero_()

    def score(self, fleet: Fleet, trained: int, tasks: int, seen: int | None) -> list[list[float]]:
        """Return the test accuracy of every run on the first tasks, after it was trained on one; see `Evaluation`."""
        heads = evaluation_heads(fleet.specs, fleet.stream, trained, min(tasks, len(fleet.stream.tasks)))
        rows: list[list[float]] = self.evaluation.score(fleet.stack, heads, fleet.dtype, seen).tolist()
        return rows

    # Results

    def finish(self, fleet: Fleet) -> None:
        """Compare every run with its model after the first task, and make the results."""
        stack, stream = fleet.stack, fleet.stream
        images = stream.test.images[stream.tasks[0].test[:COMPARED_INPUTS]]
        inputs = normalize_pixels(images, fleet.dtype).to(fleet.device)
        metrics = [rows for plugin in fleet.plugins if (rows := plugin.metrics(fleet))]
        drifts, ckas = drift_of(stack, self.first), cka_of(stack, self.first, inputs)
        for record, drift, cka, *others in zip(self.records, drifts, ckas, *metrics, strict=True):
            measured = {name: value for other in others for name, value in other.items()}
            self.results.append(self._result(fleet, record, "finished", "", drift=drift, cka=cka, **measured))
        self.records = []

    def end(self, fleet: Fleet, removed: Tensor, status: Status, reasons: list[str], steps: list[int]) -> None:
        """Make the results of runs that are removed, bool of shape (runs,), which took these numbers of steps."""
        for row in removed.nonzero().flatten().tolist():
            result = self._result(fleet, self.records[row], status, reasons[row])
            members = fleet.strength_groups.pop(result.spec.key, [result.spec])
            self.results += [replace(result, spec=spec, steps=steps[row]) for spec in members]

    def _result(self, fleet: Fleet, record: RunRecord, status: Status, reason: str, **metrics: Any) -> Result:
        final = {"steps": fleet.steps, "seconds": fleet.seconds, "scenario": fleet.stream.scenario}
        return record.result(status, reason, **final, versions=versions(str(fleet.device)), **metrics)

    # Which runs are in the fleet, and checkpoints

    def keep(self, rows: Tensor) -> None:
        """Keep the runs in these rows."""
        self.first = {name: p[rows] for name, p in self.first.items()}
        self.loss_history.keep(rows)
        self.records = [self.records[row] for row in rows.tolist()]

    def set_strengths(self, specs: Sequence[RunSpec]) -> None:
        """Give each run a record of its own."""
        self.records = [record.for_run(spec) for record, spec in zip(self.records, specs, strict=True)]

    def state_dict(self) -> PluginState:
        """Return the losses of the present task, and the first task's model."""
        first = {f"first/{name}": tensor for name, tensor in self.first.items()}
        return PluginState({"losses": self.loss_history.sums, **first})

    def load_state_dict(self, fleet: Fleet, state: PluginState) -> None:
        """Continue from these."""
        self.loss_history.sums = state.tensors["losses"].to(fleet.device)
        first = state.below("first", fleet.device)  # in the network's order, in which its sums are taken
        names = [name for name in (*fleet.stack.parameters, *fleet.stack.buffers) if name in first]
        self.first = {name: to_stack_layout(first[name]) for name in names}
