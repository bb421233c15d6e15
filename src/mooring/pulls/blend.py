"""Blend: a fixed share of the way back to the anchor, whatever a parameter is worth."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from mooring.pulls.pull import Every, ParameterPull, check_each, check_every
from mooring.pulls.run_axis import Number, per_run

__all__ = ["Blend"]


@dataclass(frozen=True)
class Blend(ParameterPull):
    """theta <- theta + share * (anchor - theta) in each `every`-th iteration, or once at the end of a task.

    Once at the end it is WiSE-FT, which averages a fine-tuned model with the one before; every few iterations it is
    SFA, a running soup of both. Use it with `Uniform()`, whose scores cost no memory: they do not count.

    Args:
        share: of the way back, from 0 to 1; one number, or one per run.
        every: act in each `every`-th iteration of a task; "task" once, when the task is consolidated.

    Example:
        >>> import torch
        >>> Blend(share=0.3).rate(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 1.0]), lr=0.1)
        tensor([0.0000, 0.3000])
    """

    share: Number
    every: Every = "task"

    reads_current: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Refuse options outside their range."""
        check_each("share", self.share, 0, 1)
        check_every(self.every)

    def rate(self, previous: Tensor, current: Tensor, lr: Number) -> Tensor:
        """The share, where anything is known of the past."""
        known: Tensor = (previous > 0).to(previous.dtype)
        return known * per_run(self.share, previous)
