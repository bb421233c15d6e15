"""Samples of past tasks that runs keep, with the predictions that each run made on them at the end of the last task."""

import torch
from torch import Tensor

from mooring.reference.kinds import Classes
from mooring.reference.mixtures import draw_mixture
from mooring_lab.fleet.data import TrainingData
from mooring_lab.fleet.evaluation import PIXELS_PER_BATCH
from mooring_lab.fleet.stack.stack import Stack


class KeptSamples:
    """Batches of past tasks and mixtures of their inputs, in every run as many, and the predictions on them.

    An entry is an image, or the mixture share * first + (1 - share) * second of two images; each batch is a range of
    entries.

    Args:
        data: the images.
        runs: the number of runs.

    Attributes:
        indices: of the images, int64 of shape (runs, samples), one task after the other.
        first, second: the samples of each entry, int64 of shape (entries,).
        share: float32 of shape (entries,).
        batches: the entries of the batches of each task; after its own batches come mixtures.
        rounds: the number of mixtures of each batch, by task.
        log_probabilities: of the predictions, of shape (runs, entries, outputs).

    Example:
        >>> from mooring_lab.streams import by_class, digits
        >>> samples = KeptSamples(TrainingData(by_class(digits(), per_task=2)), runs=2)
        >>> samples.add([torch.arange(4).expand(2, 4), torch.arange(2).expand(2, 2)])
        >>> samples.batches
        [[range(0, 4), range(4, 6)]]
    """

    def __init__(self, data: TrainingData, runs: int) -> None:
        self.data, device = data, data.images.device
        self.indices = torch.zeros(runs, 0, dtype=torch.int64, device=device)
        self.log_probabilities = torch.zeros(runs, 0, 0, device=device)
        self.sizes: list[list[int]] = []
        self.rounds: list[int] = []
        self._plan()

    def add(self, batches: list[Tensor], rounds: int = 0) -> None:
        """Keep the batches of another task, each of shape (runs, samples), and so many mixtures of each."""
        self.indices = torch.cat([self.indices, *(batch.to(self.indices.device) for batch in batches)], 1)
        self.sizes.append([batch.shape[1] for batch in batches])
        self.rounds.append(rounds)
        self._plan()

    def _plan(self) -> None:
        """Number the entries of all batches and mixtures."""
        first, second, share = list[Tensor](), list[Tensor](), list[Tensor]()
        self.batches: list[list[range]] = []
        entry, begin = 0, 0
        for sizes, rounds in zip(self.sizes, self.rounds, strict=True):
            own, ranges = torch.split(torch.arange(begin, begin + sum(sizes)), sizes), list[range]()
            for number in range(len(sizes) * (1 + rounds)):
                batch = own[number % len(sizes)]
                first.append(batch)
                if number < len(sizes):
                    second.append(batch)
                    share.append(torch.ones(len(batch)))
                else:
                    mixture = draw_mixture(number, sizes)
                    second.append(own[mixture.other][mixture.rows])
                    share.append(mixture.weights)
                ranges.append(range(entry, entry + len(batch)))
                entry += len(batch)
            self.batches.append(ranges)
            begin += sum(sizes)
        empty, device = torch.zeros(0, dtype=torch.int64), self.indices.device
        self.first, self.second = torch.cat([empty, *first]).to(device), torch.cat([empty, *second]).to(device)
        self.share = torch.cat([torch.zeros(0), *share]).to(device)

    @torch.no_grad()
    def record(self, stack: Stack) -> None:
        """Store what the runs predict now."""
        outputs = self.data.stream.grown_outputs(len(self.sizes) - 1)
        parts = [Classes().rows(self._logits(stack, part, outputs)).log_softmax(-1) for part in self._passes(stack)]
        self.log_probabilities = torch.cat([part.view(len(stack), -1, part.shape[-1]) for part in parts], 1)

    def divergence(self, stack: Stack, entries: Tensor) -> Tensor:
        """Return how far each run's prediction is from the stored one, of shape (runs, entries).

        Args:
            stack: the runs.
            entries: their numbers, int64 of shape (entries,).
        """
        stored = self.log_probabilities.index_select(1, entries).flatten(0, 1)
        logits = self._logits(stack, entries, self.log_probabilities.shape[-1])
        return Classes().divergence((stored,), logits).view(len(stack), -1)

    @torch.no_grad()
    def task_means(self, stack: Stack) -> Tensor:
        """Return the mean divergence on each task, float64 of shape (runs, tasks)."""
        values = torch.cat([self.divergence(stack, part).double() for part in self._passes(stack)], 1)
        counts = [sum(map(len, ranges)) for ranges in self.batches]
        return torch.stack([part.mean(1) for part in torch.split(values, counts, 1)], 1)

    def load(self, sizes: list[list[int]], rounds: list[int], indices: Tensor, predictions: Tensor) -> None:
        """Continue with saved samples."""
        self.sizes, self.rounds, self.indices, self.log_probabilities = sizes, rounds, indices, predictions
        self._plan()

    def keep(self, rows: Tensor) -> None:
        """Keep only the runs in these rows."""
        self.indices, self.log_probabilities = self.indices[rows], self.log_probabilities[rows]

    def _logits(self, stack: Stack, entries: Tensor, outputs: int) -> Tensor:
        """Return the first outputs in evaluation mode, (runs * entries, outputs), each by its own task's head."""
        batch = self.data.batch(self.indices.index_select(1, self.first[entries]), None)
        x = batch.x
        if any(self.rounds):
            other = self.data.batch(self.indices.index_select(1, self.second[entries]), None).x
            share = self.share[entries].to(x.dtype).view(1, -1, *[1] * (x.ndim - 2))
            x = share * x + (1 - share) * other
        return stack(x, batch.head).flatten(0, 1)[:, :outputs]

    def _passes(self, stack: Stack) -> tuple[Tensor, ...]:
        """Return all entries, as many at a time as fit; always the same, so that equal weights give equal outputs."""
        most = PIXELS_PER_BATCH[stack.device.type] // (len(stack) * self.data.images[0].numel())
        return torch.split(torch.arange(len(self.first), device=self.indices.device), max(1, most))
