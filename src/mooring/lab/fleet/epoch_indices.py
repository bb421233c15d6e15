"""What every run of a fleet sees in one epoch, laid out on the device before the first step."""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["Feed"]


class Feed:
    """Places of images for every step of an epoch, and a hand that moves from step to step without the host.

    The memory is written anew for each epoch of one shape, so that a recorded step stays good.

    Args:
        device: where it lies.

    Attributes:
        fresh: the epoch's images in their order, int64 of shape (runs, images).
        sizes: how many of them each step takes.
        drawn: how many remembered images each step has beside them.

    Example:
        >>> feed = Feed()
        >>> feed.load(torch.arange(6).view(2, 3), [2, 1])
        >>> feed.next(2)
        tensor([[0, 1],
                [3, 4]])
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.fresh = torch.zeros(0, 0, dtype=torch.int64, device=device)
        self.remembered = torch.zeros(0, 0, 0, dtype=torch.int64, device=device)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self.begin = torch.zeros(1, dtype=torch.int64, device=device)
        self.sizes: list[int] = []
        self.drawn: list[int] = []

    def load(self, fresh: Tensor, sizes: Sequence[int], remembered: Sequence[Tensor] = (), step: int = 0) -> None:
        """Lay out an epoch.

        Args:
            fresh: of shape (runs, images).
            sizes: of the steps; they sum to the images.
            remembered: what each step draws from memory, each of shape (runs, any).
            step: where to begin.
        """
        self.sizes, self.drawn = list(sizes), [each.shape[1] for each in remembered] or [0] * len(sizes)
        widest = max(self.drawn, default=0)
        laid = torch.zeros(len(fresh), len(self.sizes) if widest else 0, widest, dtype=torch.int64)
        for number, each in enumerate(remembered if widest else ()):
            laid[:, number, : each.shape[1]] = each
        self.fresh, self.remembered = self._put(self.fresh, fresh), self._put(self.remembered, laid)
        self.step.fill_(step)
        self.begin.fill_(sum(self.sizes[:step]))

    def _put(self, old: Tensor, new: Tensor) -> Tensor:
        return old.copy_(new) if old.shape == new.shape else new.to(self.device)

    def next(self, size: int) -> Tensor:
        """The places of so many images for each run, from where the hand points."""
        return self.fresh.index_select(1, self.begin + torch.arange(size, device=self.device))

    def recall(self, count: int) -> Tensor:
        """The remembered places of this step."""
        return self.remembered.index_select(1, self.step).squeeze(1)[:, :count]

    def move(self, size: int) -> None:
        """On to the next step."""
        self.step += 1
        self.begin += size

    def keep(self, rows: Tensor) -> None:
        """Go on with these runs only."""
        if self.sizes:
            self.fresh, self.remembered = self.fresh[rows], self.remembered[rows]
