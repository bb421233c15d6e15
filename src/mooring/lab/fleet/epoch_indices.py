"""The training images of one epoch, as indices that a fleet's steps read on the device."""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["EpochIndices"]


class EpochIndices:
    """Image indices of every step of an epoch, and a position that advances on the device.

    Epochs of one shape reuse the same memory, so that captured CUDA graphs stay valid.

    Args:
        device: where the indices are stored.

    Attributes:
        indices: the epoch's images in training order, int64 of shape (runs, images).
        sizes: the number of these images in each step.
        replay_indices: the replayed images of each step, int64 of shape (runs, steps, largest replay size).
        replay_sizes: the number of replayed images in each step.
        step: the current step, int64 of shape (1,).
        offset: the first column of `indices` that the current step reads, int64 of shape (1,).

    Example:
        >>> epoch = EpochIndices()
        >>> epoch.load(torch.arange(6).view(2, 3), [2, 1])
        >>> epoch.next_batch(2)
        tensor([[0, 1],
                [3, 4]])
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.indices = torch.zeros(0, 0, dtype=torch.int64, device=device)
        self.replay_indices = torch.zeros(0, 0, 0, dtype=torch.int64, device=device)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self.offset = torch.zeros(1, dtype=torch.int64, device=device)
        self.sizes: list[int] = []
        self.replay_sizes: list[int] = []

    def load(self, indices: Tensor, sizes: Sequence[int], replayed: Sequence[Tensor] = (), step: int = 0) -> None:
        """Copy an epoch to the device.

        Args:
            indices: of shape (runs, images).
            sizes: of the steps; they sum to the number of images.
            replayed: the replayed images of each step, each of shape (runs, any).
            step: the step to start from.
        """
        self.sizes, self.replay_sizes = list(sizes), [drawn.shape[1] for drawn in replayed] or [0] * len(sizes)
        largest = max(self.replay_sizes, default=0)
        padded = torch.zeros(len(indices), len(self.sizes) if largest else 0, largest, dtype=torch.int64)
        for number, drawn in enumerate(replayed if largest else ()):
            padded[:, number, : drawn.shape[1]] = drawn
        self.indices, self.replay_indices = self._put(self.indices, indices), self._put(self.replay_indices, padded)
        self.step.fill_(step)
        self.offset.fill_(sum(self.sizes[:step]))

    def _put(self, old: Tensor, new: Tensor) -> Tensor:
        return old.copy_(new) if old.shape == new.shape else new.to(self.device)

    def next_batch(self, size: int) -> Tensor:
        """Return the indices of the current step, of shape (runs, size)."""
        return self.indices.index_select(1, self.offset + torch.arange(size, device=self.device))

    def replay_batch(self, size: int) -> Tensor:
        """Return the replayed indices of the current step, of shape (runs, size)."""
        return self.replay_indices.index_select(1, self.step).squeeze(1)[:, :size]

    def advance(self, size: int) -> None:
        """Move to the next step, after a step of this size."""
        self.step += 1
        self.offset += size

    def keep(self, rows: Tensor) -> None:
        """Keep only the runs in these rows."""
        if self.sizes:
            self.indices, self.replay_indices = self.indices[rows], self.replay_indices[rows]
