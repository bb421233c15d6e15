"""Images mirrored and moved at random, so that a network sees none of them twice in the same place."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mooring.lab.model.order import seeded_generator

__all__ = ["drawn", "moved"]


def drawn(seeds: Sequence[int], epoch: int, images: int, *, flips: bool, shifts: int) -> Tensor:
    """What becomes of each image of an epoch, by each run's own seed: int64 of shape (3, runs, images).

    Mirrored (1) or not (0), then how many pixels down, then how many to the right.

    Args:
        seeds: of the runs.
        epoch: its number.
        images: how many there are in it.
        flips: whether half of them are mirrored.
        shifts: how many pixels they are moved at most, in both directions.

    Example:
        >>> drawn([0, 1], epoch=0, images=5, flips=True, shifts=0).shape
        torch.Size([3, 2, 5])
    """
    found = torch.zeros(3, len(seeds), images, dtype=torch.int64)
    for run, seed in enumerate(seeds):
        if flips:
            found[0, run] = torch.rand(images, generator=seeded_generator(seed, "flips", epoch)) < 0.5
        if shifts:
            random = seeded_generator(seed, "shifts", epoch)
            found[1:, run] = torch.randint(-shifts, shifts + 1, (2, images), generator=random)
    return found


def moved(images: Tensor, places: Tensor, mirrored: Tensor, down: Tensor, right: Tensor) -> Tensor:
    """The images at these places, mirrored and then moved, in one gather; what nothing was moved to is black, byte 0.

    Args:
        images: bytes, of shape (all, channels, height, width).
        places: int64 of shape (chosen,).
        mirrored: not 0 where an image is, of shape (chosen,).
        down: pixels, of shape (chosen,).
        right: pixels, of shape (chosen,).

    Returns:
        Bytes of shape (chosen, channels, height, width), channels last in memory.

    Example:
        >>> images, one = torch.tensor([[[[1, 2, 3]]]], dtype=torch.uint8), torch.ones(1, dtype=torch.int64)
        >>> moved(images, 0 * one, 0 * one, 0 * one, one).flatten().tolist()
        [0, 1, 2]
        >>> moved(images, 0 * one, one, 0 * one, one).flatten().tolist()
        [0, 3, 2]
    """
    height, width = images.shape[2:]
    rows = torch.arange(height, device=images.device) - down[:, None]
    columns = torch.arange(width, device=images.device) - right[:, None]
    outside = _outside(rows, height)[:, :, None] | _outside(columns, width)[:, None, :]
    columns = torch.where(mirrored[:, None] != 0, width - 1 - columns, columns)
    rows, columns = rows.clamp(0, height - 1), columns.clamp(0, width - 1)
    found = images[places[:, None, None], :, rows[:, :, None], columns[:, None, :]]
    return found.masked_fill_(outside[..., None], 0).permute(0, 3, 1, 2)


def _outside(where: Tensor, size: int) -> Tensor:
    return (where < 0) | (where >= size)
