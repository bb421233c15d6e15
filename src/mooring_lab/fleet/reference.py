"""What the runs of a fleet keep of past tasks to measure their budgets on, or to distil."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mooring.errors import MooringError
from mooring.reference.split import split_batches
from mooring_lab.fleet.data import TrainingData
from mooring_lab.fleet.kept_samples import KeptSamples
from mooring_lab.fleet.method_groups import MethodGroups
from mooring_lab.fleet.method_state import Tensors
from mooring_lab.fleet.run_budgets import RunBudgets
from mooring_lab.fleet.run_distillation import RunDistillation
from mooring_lab.fleet.stack.stack import Stack
from mooring_lab.model.spec import RunSpec


class Reference:
    """A memory with an equal share for each past task: its first samples in each run's order.

    A method that measures and distils splits each share between the two, as `split_batches` does.

    Args:
        measures: whether budgets are measured.
        distils: whether predictions are distilled.
        specs: the runs.
        data: the images.
        groups: the methods' states.

    Attributes:
        share: the number of samples of a past task.
        budgets: the measured budgets; None if nothing is measured.
        distillation: what is distilled; None if nothing is.
    """

    def __init__(
        self, measures: bool, distils: bool, specs: Sequence[RunSpec], data: TrainingData, groups: MethodGroups
    ) -> None:
        tasks, memory, batch = max(1, len(data.stream.tasks) - 1), specs[0].memory or 0, specs[0].batch
        self.share = memory // tasks
        if not self.share:
            raise MooringError(
                f"a memory of {memory} is less than one sample for each of {tasks} past tasks: give {specs[0].method} "
                f"memory={tasks} or more"
            )
        self.distillation, self.budgets = None, None
        if distils:
            self.distillation = RunDistillation(measures, specs, KeptSamples(data, len(specs), batch))
        if measures:
            self.budgets = RunBudgets(KeptSamples(data, len(specs), batch), groups, self.distillation)
        self.batch = batch

    @property
    def samples(self) -> dict[str, KeptSamples]:
        """The kept samples, by what they are for."""
        measured = {"gauge": self.budgets.gauge} if self.budgets else {}
        return measured | ({"distilled": self.distillation.samples} if self.distillation else {})

    def start_task(self, order: Tensor, stack: Stack) -> None:
        """Keep samples of the task that ended, and store the predictions of every run on all kept samples.

        Args:
            order: the samples of the task in each run's order, of shape (runs, samples).
            stack: the runs.
        """
        batches = torch.split(order[:, : self.share], self.batch, 1)
        parts = split_batches(batches) if self.budgets and self.distillation else [batches]
        for samples, own in zip(self.samples.values(), parts, strict=True):
            samples.add(torch.cat(list(own), 1))
            samples.record(stack)
        if self.budgets:
            self.budgets.start_task()

    def keep(self, rows: Tensor) -> None:
        """Keep only the runs in these rows."""
        for part in (self.budgets, self.distillation):
            if part is not None:
                part.keep(rows)

    # In checkpoints

    def sizes(self) -> dict[str, list[int]]:
        """Return the number of kept samples of each task, by what they are for."""
        return {name: samples.sizes for name, samples in self.samples.items()}

    def tensors(self) -> Tensors:
        """Return what is kept for each run, by name."""
        tensors: Tensors = {}
        for name, samples in self.samples.items():
            tensors |= {f"{name}.indices": samples.indices, f"{name}.predictions": samples.log_probabilities}
        if self.budgets:
            tensors["latest"] = self.budgets.latest
        if self.distillation and self.distillation.samples.sizes:  # before, they follow from the strengths
            tensors["weights"] = self.distillation.weights
        return tensors

    def load(self, sizes: dict[str, list[int]], tensors: Tensors) -> None:
        """Continue from what `sizes` and `tensors` returned."""
        for name, samples in self.samples.items():
            samples.sizes, samples.indices = list(sizes[name]), tensors[f"{name}.indices"]
            samples.log_probabilities = tensors[f"{name}.predictions"]
        if self.budgets:
            self.budgets.latest = tensors["latest"].cpu()
        if self.distillation and "weights" in tensors:
            self.distillation.weights = tensors["weights"]
