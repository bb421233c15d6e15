"""Replay memory: a reservoir of sample indices for each run, and the gradient projection of A-GEM."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mooring_lab.model.order import seeded_generator


class Reservoir:
    """A uniform sample without replacement of all indices offered so far, for each run (Vitter's algorithm R).

    The n-th offered index draws a random slot among n, and is kept if that slot is within the capacity. The random
    numbers depend only on the seed and on how many indices were offered, so a checkpoint needs no generator state.

    Args:
        seeds: the seed of each run.
        capacity: the number of indices to keep.

    Attributes:
        kept: int64 of shape (runs, capacity); the first min(offered, capacity) columns are filled.
        offered: the number of indices offered to each run.
        drawn: the number of samples drawn so far.

    Example:
        >>> memory = Reservoir(seeds=[0, 1], capacity=3)
        >>> memory.offer(torch.arange(10).expand(2, 10))
        >>> memory.kept.shape, memory.offered, memory.sample(2).shape
        (torch.Size([2, 3]), 10, torch.Size([2, 2]))
    """

    def __init__(self, seeds: Sequence[int], capacity: int) -> None:
        self.seeds = list(seeds)
        self.kept = torch.zeros(len(self.seeds), capacity, dtype=torch.int64)
        self.offered = self.drawn = 0

    def __len__(self) -> int:
        """Return how many indices each run has kept."""
        return min(self.offered, self.kept.shape[1])

    def offer(self, indices: Tensor) -> None:
        """Offer new indices to each run, of shape (runs, n)."""
        kept, offered = self.kept.numpy(), indices.numpy()
        for runs, slots in self._slots_of_next(indices.shape[1]):
            inside = slots < self.kept.shape[1]
            for run in runs:
                kept[run, slots[inside]] = offered[run, inside]  # of several indices for one slot the last stays
        self.offered += indices.shape[1]

    def _slots_of_next(self, count: int) -> Iterator[tuple[list[int], Any]]:
        """Yield the runs of each seed and the slots of the next indices, as an array; beyond capacity if not kept."""
        order, capacity = torch.arange(self.offered, self.offered + count), self.kept.shape[1]
        for seed, runs in self._by_seed().items():
            random = seeded_generator(seed, "reservoir", self.offered)
            uniform = torch.rand(count, generator=random, dtype=torch.float64)
            yield runs, torch.where(order < capacity, order, (uniform * (order + 1)).long()).numpy()

    def sample(self, count: int) -> Tensor:
        """Draw from each run's memory without replacement: int64 of shape (runs, min(count, len(self)))."""
        return self.kept.gather(1, self.draw_slots(count))

    def draw_slots(self, count: int) -> Tensor:
        """Draw filled slots of each run's memory, without replacement, as `sample` does."""
        self.drawn += 1
        chosen = torch.empty(len(self.seeds), min(count, len(self)), dtype=torch.int64)
        for seed, runs in self._by_seed().items():
            chosen[runs] = torch.randperm(len(self), generator=seeded_generator(seed, "replay", self.drawn))[:count]
        return chosen

    def _by_seed(self) -> dict[int, list[int]]:
        """Group the runs by seed: runs of one seed draw the same."""
        groups: dict[int, list[int]] = {}
        for run, seed in enumerate(self.seeds):
            groups.setdefault(seed, []).append(run)
        return groups

    def plan(
        self, order: Tensor, sizes: Sequence[int], *, offer: bool, count: int | None = None, updates: int = 1
    ) -> list[Tensor]:
        """Draw the replayed indices of every step of an epoch in advance; draws do not depend on training.

        Args:
            order: the epoch's indices, of shape (runs, images).
            sizes: the number of images in each batch; a step draws as many from memory.
            offer: whether the images of a batch are offered to the memory after its steps.
            count: the number of indices that each step draws instead.
            updates: the number of steps that each batch is trained for.
        """
        drawn = []
        for taken in torch.split(order, list(sizes), 1):
            for _ in range(updates):
                drawn.append(self.sample(count or taken.shape[1]) if len(self) else taken[:, :0])
            if offer:
                self.offer(taken)
        return drawn

    def keep(self, rows: Tensor) -> None:
        """Keep only the runs in these rows."""
        self.seeds = [self.seeds[row] for row in rows.tolist()]
        self.kept = self.kept[rows.cpu()]


def project_agem(gradients: dict[str, Tensor], reference: dict[str, Tensor]) -> dict[str, Tensor]:
    """Project gradients as A-GEM does: g <- g - (g . r / r . r) * r where g . r < 0.

    The products are taken over all parameters of a run.

    Args:
        gradients: g, of the task's loss, by parameter name, each of shape (runs, ...).
        reference: r, of the loss on replayed samples. A parameter that is missing in one of the two counts as 0 there.

    Example:
        >>> g, r = torch.tensor([[1.0, -1.0], [1.0, 1.0]]), torch.tensor([[0.0, 2.0], [0.0, 2.0]])
        >>> project_agem({"theta": g}, {"theta": r})["theta"]
        tensor([[1., 0.],
                [1., 1.]])
    """
    shapes = {name: tensor.shape for name, tensor in {**gradients, **reference}.items()}
    g, r = _row(gradients, shapes), _row(reference, shapes)
    dot, norm = (g * r).sum(1), r.square().sum(1)
    scale = torch.where(dot < 0, -dot / norm, 0.0)
    parts = torch.split(g + scale.unsqueeze(1) * r, [shape[1:].numel() for shape in shapes.values()], 1)
    return {name: part.view(shape) for part, (name, shape) in zip(parts, shapes.items(), strict=True)}


def _row(tensors: dict[str, Tensor], shapes: dict[str, torch.Size]) -> Tensor:
    """Concatenate the tensors of each run, with 0 for missing ones; of shape (runs, elements)."""
    like = next(iter(tensors.values()))
    complete = (tensors[name] if name in tensors else like.new_zeros(shape) for name, shape in shapes.items())
    return torch.cat([tensor.reshape(len(like), -1) for tensor in complete], 1)
