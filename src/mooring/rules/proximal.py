"""Proximal: the penalty as a separate proximal step, which does not extrapolate at any strength."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mooring.rules.pull import Number, ParameterPull, check_numbers, per_run


def proximal_rate(previous: Tensor, strength: Number, lr: Number) -> Tensor:
    """Return R = p / (1 + p) with p = lr * strength * previous, the rate of a proximal step on the penalty.

    theta + R * (anchor - theta) minimises |theta' - theta|^2 / 2 + p * (theta' - anchor)^2 / 2.
    Negative scores count as 0, infinite ones as the largest finite number.

    Args:
        previous: the importance over past tasks, (...) or (runs, ...).
        strength: the factor of the penalty; one number, or one per run.
        lr: the learning rate; one number, or one per run.

    Example:
        >>> proximal_rate(torch.tensor([0.0, 1.0, 1e9]), strength=100.0, lr=0.01)
        tensor([0.0000, 0.5000, 1.0000])
    """
    largest = torch.finfo(previous.dtype).max
    p = previous.clamp(0, largest) * (per_run(lr, previous) * per_run(strength, previous))
    return (p / (1 + p)).nan_to_num_(nan=1.0)  # p itself may overflow


@dataclass(frozen=True)
class Proximal(ParameterPull):
    """theta <- theta + R * (anchor - theta), R = lr * strength * previous / (1 + lr * strength * previous).

    Args:
        strength: the factor of the penalty; one number, or one per run.

    Example:
        >>> Proximal(strength=100.0).rate(torch.tensor([1.0]), torch.tensor([1.0]), lr=0.01)
        tensor([0.5000])
    """

    strength: Number
    reads_current: ClassVar[bool] = False
    reads_lr: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_numbers("strength", self.strength, 0)

    def rate(self, previous: Tensor, current: Tensor, lr: Number) -> Tensor:
        """Return `proximal_rate` at this strength; the current importance is not used."""
        return proximal_rate(previous, self.strength, lr)
