"""Samples of past tasks that runs keep, with the predictions that each run made on them at the end of the last task."""

from itertools import accumulate, pairwise

import torch
from torch import Tensor

from mooring.reference.divergence import StoredPredictions, rows_of_logits
from mooring_lab.fleet.data import TrainingData
from mooring_lab.fleet.evaluation import PIXELS_PER_BATCH
from mooring_lab.fleet.stack.stack import Stack


class KeptSamples:
    """Training samples of past tasks, of each task as many in every run, and the predictions on them.

    Args:
        data: the images.
        runs: the number of runs.
        batch: the number of samples in a batch.

    Attributes:
        indices: of the images, int64 of shape (runs, samples), one task after the other.
        log_probabilities: of the predictions, of shape (runs, samples, outputs).
        sizes: the number of samples of each task.

    Example:
        >>> from mooring_lab.streams import by_class, digits
        >>> samples = KeptSamples(TrainingData(by_class(digits(), per_task=2)), runs=2, batch=4)
        >>> samples.add(torch.arange(6).expand(2, 6))
        >>> samples.batches()
        [range(0, 4), range(4, 6)]
    """

    def __init__(self, data: TrainingData, runs: int, batch: int) -> None:
        self.data, self.batch = data, batch
        self.indices = torch.zeros(runs, 0, dtype=torch.int64, device=data.images.device)
        self.log_probabilities = torch.zeros(runs, 0, 0, device=data.images.device)
        self.sizes: list[int] = []

    def add(self, indices: Tensor) -> None:
        """Keep samples of another task, of shape (runs, samples)."""
        self.indices = torch.cat([self.indices, indices.to(self.indices.device)], 1)
        self.sizes.append(indices.shape[1])

    def batches(self) -> list[range]:
        """Return the samples of each batch; none has samples of two tasks."""
        ends = [0, *accumulate(self.sizes)]
        tasks = [range(begin, end) for begin, end in pairwise(ends)]
        return [task[begin : begin + self.batch] for task in tasks for begin in range(0, len(task), self.batch)]

    @torch.no_grad()
    def record(self, stack: Stack) -> None:
        """Store what the runs predict now."""
        outputs = self.data.stream.grown_outputs(len(self.sizes) - 1)
        parts = [rows_of_logits(self._logits(stack, part, outputs)).log_softmax(-1) for part in self._passes(stack)]
        self.log_probabilities = torch.cat([part.view(len(stack), -1, part.shape[-1]) for part in parts], 1)

    def divergence(self, stack: Stack, samples: Tensor) -> Tensor:
        """Return how far each run's prediction is from the stored one, of shape (runs, samples).

        Args:
            stack: the runs.
            samples: numbers of kept samples, int64 of shape (samples,).
        """
        stored = StoredPredictions(self.log_probabilities.index_select(1, samples).flatten(0, 1))
        logits = self._logits(stack, samples, self.log_probabilities.shape[-1])
        return stored.divergence(logits).view(len(stack), -1)

    @torch.no_grad()
    def task_means(self, stack: Stack) -> Tensor:
        """Return the mean divergence on each task, float64 of shape (runs, tasks)."""
        values = torch.cat([self.divergence(stack, part).double() for part in self._passes(stack)], 1)
        return torch.stack([part.mean(1) for part in torch.split(values, self.sizes, 1)], 1)

    def keep(self, rows: Tensor) -> None:
        """Keep only the runs in these rows."""
        self.indices, self.log_probabilities = self.indices[rows], self.log_probabilities[rows]

    def _logits(self, stack: Stack, samples: Tensor, outputs: int) -> Tensor:
        """Return the first outputs in evaluation mode, (runs * samples, outputs), each by its own task's head."""
        batch = self.data.batch(self.indices.index_select(1, samples), None)
        return stack(batch.x, batch.head).flatten(0, 1)[:, :outputs]

    def _passes(self, stack: Stack) -> tuple[Tensor, ...]:
        """Return all samples, as many at a time as fit; always the same, so that equal weights give equal outputs."""
        most = PIXELS_PER_BATCH[stack.device.type] // (len(stack) * self.data.images[0].numel())
        return torch.split(torch.arange(self.indices.shape[1], device=self.indices.device), max(1, most))
