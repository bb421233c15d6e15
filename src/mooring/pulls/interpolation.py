"""Interpolation: the paper's explicit step, which needs no strength."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mooring.errors import check_number, check_whole
from mooring.pulls.base import ParameterPull
from mooring.runs import Number

__all__ = ["Interpolation", "relative_importance"]


def relative_importance(previous: Tensor, current: Tensor, root: float = 2) -> Tensor:
    """R = previous^(1/root) / (current^(1/root) + previous^(1/root)).

    Computed as 1 / (1 + (previous / current)^(-1/root)), which does not overflow. R is 0 where previous is 0
    (also at 0/0: a unit that never mattered stays free) and 1 where only current is 0. Negative scores
    count as 0, infinite ones as the largest finite number.

    Args:
        previous: the importance over past tasks, of any shape.
        current: the importance on this one, of the same shape.
        root: 2 is the paper's square root, 1 the plain ratio.

    Example:
        >>> relative_importance(torch.tensor([0.0, 4.0, 4.0]), torch.tensor([0.0, 0.0, 36.0]))
        tensor([0.0000, 1.0000, 0.2500])
    """
    largest = torch.finfo(previous.dtype).max
    ratio = previous.clamp(0, largest).div_(current.clamp(0, largest))
    ratio.nan_to_num_(nan=0.0, posinf=torch.inf, neginf=torch.inf)  # 0/0 and x/-0; a mask would cost far more
    return ratio.pow_(-1 / root).add_(1).reciprocal_()


@dataclass(frozen=True)
class Interpolation(ParameterPull):
    """theta <- theta + stiffness * R * (anchor - theta), R = sqrt(previous) / (sqrt(current) + sqrt(previous)).

    Args:
        stiffness: 1 is the paper; smaller holds less.
        every: act in each `every`-th iteration of a task; a whole task's worth is merging of weights.
        root: 2 is the paper's square root, 3 a cube root, 1 the plain ratio.

    Example:
        >>> Interpolation().rate(torch.tensor([1.0]), torch.tensor([1.0]), lr=0.1)
        tensor([0.5000])
    """

    stiffness: float = 1.0
    every: int = 1
    root: float = 2

    def __post_init__(self) -> None:
        """Refuse options outside their range."""
        check_number("stiffness", self.stiffness, 0, 1)
        check_number("root", self.root, 0, above=True)
        check_whole("every", self.every, 1)

    def rate(self, previous: Tensor, current: Tensor, lr: Number) -> Tensor:
        """stiffness * `relative_importance`; the learning rate plays no part."""
        rate = relative_importance(previous, current, self.root)
        return rate if self.stiffness == 1 else rate.mul_(self.stiffness)
