"""Blend: interpolation with the anchor by a fixed share, whatever the importance."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from mooring.rules.pull import Every, Number, ParameterPull, check_every, check_numbers, per_run


@dataclass(frozen=True)
class Blend(ParameterPull):
    """theta <- theta + share * (anchor - theta) in each `every`-th iteration, or once at the end of a task.

    Once at the end of a task it is WiSE-FT, which averages a fine-tuned model with the one before. Every few iterations
    it is SFA, a running average of both. Use it with `Uniform()`, whose scores cost no memory, since their size has
    no effect.

    Args:
        share: the weight of the anchor, from 0 to 1; one number, or one per run.
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
        check_numbers("share", self.share, 0, 1)
        check_every(self.every)

    def rate(self, previous: Tensor, current: Tensor, lr: Number) -> Tensor:
        """Return the share where the previous importance is above 0, and 0 elsewhere."""
        anchored: Tensor = (previous > 0).to(previous.dtype)
        return anchored * per_run(self.share, previous)
