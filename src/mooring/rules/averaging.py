"""The average over the iterations of a task, used by EWC, MAS, RWalk and Kronecker."""

import torch
from torch import Tensor

from mooring.errors import MooringError


def average(current: Tensor, score: Tensor, decay: float | None, count: int, *, out: Tensor | None = None) -> Tensor:
    """Update the running average, or the mean over the task if decay is None.

    current <- decay * current + (1 - decay) * score
    current <- current + (score - current) / count        (decay=None)

    Args:
        current: the average so far, of any shape.
        score: this iteration's score, of the same shape.
        decay: the weight of the past, 0 <= decay < 1, or None.
        count: the number of scores including this one, from 1.
        out: the tensor for the result, which may be `current`; by default a new one.

    Example:
        >>> average(torch.tensor([1.0]), torch.tensor([6.0]), 0.2, 2)
        tensor([5.])
        >>> average(torch.tensor([1.0]), torch.tensor([6.0]), None, 5)
        tensor([2.])
    """
    return torch.lerp(current, score, 1 / count if decay is None else 1 - decay, out=out)


def check_decay(decay: float | None) -> None:
    """Refuse a decay outside [0, 1)."""
    if decay is not None and (not isinstance(decay, int | float) or not 0 <= decay < 1):
        raise MooringError(f"decay={decay!r} is not allowed: 0 <= decay < 1, or None for the mean over the task")
