"""Interpolation: the paper's explicit interpolation step, which needs no strength."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mooring.errors import check_number
from mooring.rules.pull import Every, Number, ParameterPull, check_every, check_numbers, per_run


def relative_importance(
    previous: Tensor, current: Tensor, root: float = 2, weight: Number = 1.0, *, returns: bool = False
) -> Tensor:
    """Return R = (weight * previous)^(1/root) / (current^(1/root) + (weight * previous)^(1/root)).

    It is computed as 1 / (1 + (weight * previous / current)^(-1/root)), which does not overflow. R is 0 where previous
    is 0, also at 0/0, so a parameter that never mattered stays free; R is 1 where only current is 0. Negative scores
    count as 0, infinite ones as the largest finite number.

    Args:
        previous: the importance over past tasks, of any shape.
        current: the importance on this one, of the same shape.
        root: 2 is the paper's square root, 1 the plain ratio.
        weight: a factor of `previous`; one number, or one per run.
        returns: whether R is 1 at 0/0, so that a parameter that never mattered returns to its anchor.

    Example:
        >>> relative_importance(torch.tensor([0.0, 4.0, 4.0]), torch.tensor([0.0, 0.0, 36.0]))
        tensor([0.0000, 1.0000, 0.2500])
    """
    largest = torch.finfo(previous.dtype).max
    ratio = previous.clamp(0, largest).div_(current.clamp(0, largest))
    at_zero = torch.inf if returns else 0.0
    ratio.nan_to_num_(nan=at_zero, posinf=torch.inf, neginf=torch.inf)  # 0/0 and x/-0; a mask would be much slower
    if isinstance(weight, Tensor) or weight != 1:
        ratio.mul_(per_run(weight, ratio))
    return ratio.pow_(-1 / root).add_(1).reciprocal_()


@dataclass(frozen=True)
class Interpolation(ParameterPull):
    """theta <- theta + stiffness * R * (anchor - theta), R = sqrt(previous) / (sqrt(current) + sqrt(previous)).

    Args:
        stiffness: a factor of R, from 0 to 1; 1 is the paper's. One number, or one per run.
        every: act in each `every`-th iteration of a task; "task" acts once, when the task is consolidated, which
            merges weights: with root=1 and a mean Fisher that is summed over tasks it is Fisher-weighted averaging.
        root: 2 is the paper's square root, 3 a cube root, 1 the plain ratio.
        weight: a factor of the previous importance in R; 1 is the paper's. One number, or one per run.
        returns: whether a parameter that never mattered returns to its anchor, as in the public code of Lubana et al.
            (https://github.com/EkdeepSLubana/QRforgetting, commit 317fd2d), which adds 1e-20 to the denominator of
            1 - R. By default it stays free.

    Example:
        >>> Interpolation().rate(torch.tensor([1.0]), torch.tensor([1.0]), lr=0.1)
        tensor([0.5000])
    """

    stiffness: Number = 1.0
    every: Every = 1
    root: float = 2
    weight: Number = 1.0
    returns: bool = False

    def __post_init__(self) -> None:
        check_numbers("stiffness", self.stiffness, 0, 1)
        check_number("root", self.root, 0, above=True)
        check_every(self.every)
        check_numbers("weight", self.weight, 0, above=True)

    def rate(self, previous: Tensor, current: Tensor, lr: Number) -> Tensor:
        """Return stiffness * `relative_importance`; the learning rate is not used."""
        rate = relative_importance(previous, current, self.root, self.weight, returns=self.returns)
        is_one = not isinstance(self.stiffness, Tensor) and self.stiffness == 1
        return rate if is_one else rate.mul_(per_run(self.stiffness, rate))
