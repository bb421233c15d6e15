"""Memory of old samples: a reservoir of indices for each run, and what A-GEM does with gradients from it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mooring.lab.model.order import seeded_generator

__all__ = ["Reservoir", "project"]


class Reservoir:
    """A uniform sample without replacement of every index offered so far, for each run (Vitter's algorithm R).

    The n-th index offered takes a random place among n; it is kept where that place is within the capacity. Random
    numbers are fixed by (seed, how many were offered), so that nothing but the content has to be saved.

    Args:
        seeds: of each run.
        capacity: how many indices are kept.

    Attributes:
        kept: int64 of shape (runs, capacity); the first min(offered, capacity) columns count.
        offered: how many indices each run was offered.

    Example:
        >>> memory = Reservoir(seeds=[0, 1], capacity=3)
        >>> memory.offer(torch.arange(10).expand(2, 10))
        >>> memory.kept.shape, memory.offered, memory.sample(2).shape
        (torch.Size([2, 3]), 10, torch.Size([2, 2]))
    """

    def __init__(self, seeds: Sequence[int], capacity: int) -> None:
        self.seeds = list(seeds)
        self.kept = torch.zeros(len(self.seeds), capacity, dtype=torch.int64)
        self.offered = 0
        self.drawn = 0

    def __len__(self) -> int:
        """How many indices each run keeps."""
        return min(self.offered, self.kept.shape[1])

    def offer(self, indices: Tensor) -> None:
        """Offer each run new indices, of shape (runs, n)."""
        count, capacity = indices.shape[1], self.kept.shape[1]
        order = torch.arange(self.offered, self.offered + count)
        kept, offered = self.kept.numpy(), indices.numpy()
        for seed, runs in self._by_seed().items():
            drawn = torch.rand(count, generator=seeded_generator(seed, "reservoir", self.offered), dtype=torch.float64)
            places = torch.where(order < capacity, order, (drawn * (order + 1)).long()).numpy()
            inside = places < capacity
            for run in runs:
                kept[run, places[inside]] = offered[run, inside]  # of those for one place, the last
        self.offered += count

    def sample(self, count: int) -> Tensor:
        """Draw from each run's memory without replacement: int64 of shape (runs, min(count, kept))."""
        self.drawn += 1
        size = len(self)
        chosen = torch.empty(len(self.seeds), min(count, size), dtype=torch.int64)
        for seed, runs in self._by_seed().items():
            places = torch.randperm(size, generator=seeded_generator(seed, "replay", self.drawn))[:count]
            chosen[runs] = self.kept[runs][:, places]
        return chosen

    def _by_seed(self) -> dict[int, list[int]]:
        """The runs of each seed: what they draw is the same."""
        found: dict[int, list[int]] = {}
        for run, seed in enumerate(self.seeds):
            found.setdefault(seed, []).append(run)
        return found

    def plan(self, order: Tensor, sizes: Sequence[int], *, offer: bool, count: int | None = None) -> list[Tensor]:
        """What each step of an epoch draws, as if the steps were taken; draws do not depend on what training does.

        Args:
            order: the epoch's indices, of shape (runs, images).
            sizes: how many of them each step takes; it draws as many.
            offer: whether each step then offers what it took.
            count: how many each step draws instead.
        """
        drawn = []
        for taken in torch.split(order, list(sizes), 1):
            drawn.append(self.sample(count or taken.shape[1]) if len(self) else taken[:, :0])
            if offer:
                self.offer(taken)
        return drawn

    def copy(self) -> "Reservoir":
        """Another one of the same content, that goes on the same way."""
        other = Reservoir(self.seeds, self.kept.shape[1])
        other.kept, other.offered, other.drawn = self.kept.clone(), self.offered, self.drawn
        return other

    def keep(self, rows: Tensor) -> None:
        """Go on with these runs only."""
        self.seeds = [self.seeds[row] for row in rows.tolist()]
        self.kept = self.kept[rows.cpu()]


def project(gradients: dict[str, Tensor], reference: dict[str, Tensor]) -> dict[str, Tensor]:
    """A-GEM: g <- g - (g . r / r . r) * r where g . r < 0, the products taken over all parameters of a run.

    Args:
        gradients: of the task's loss, by parameter name, each of shape (runs, ...).
        reference: r, of the loss on old samples; parameters that one of the two lacks count as 0 there.

    Example:
        >>> g, r = torch.tensor([[1.0, -1.0], [1.0, 1.0]]), torch.tensor([[0.0, 2.0], [0.0, 2.0]])
        >>> project({"theta": g}, {"theta": r})["theta"]
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
    """All tensors of a run in one row, 0 for those that are not there; of shape (runs, numbers)."""
    like = next(iter(tensors.values()))
    every = (tensors[name] if name in tensors else like.new_zeros(shape) for name, shape in shapes.items())
    return torch.cat([tensor.reshape(len(like), -1) for tensor in every], 1)
