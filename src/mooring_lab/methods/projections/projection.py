"""What a method that projects must define: gradients away from past inputs, or weights into balls around the anchor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from mooring.rules.pull import Number, check_numbers

State = dict[str, Tensor]
"""Tensors that a projection keeps, each with a leading run axis."""


class InputProjection(ABC):
    """A projection of the gradient of a layer, g <- g P, where P depends on the inputs of the layer in past tasks.

    A bias is the weight of one more input, which is 1. If P x = 0 for an input x of a past task, the output of the
    layer for it does not change.
    """

    samples: ClassVar[int | None] = None
    """The number of samples of a task that are looked at when it ends; None for all."""

    @abstractmethod
    def update(self, state: State, moment: Tensor, count: int) -> State:
        """Return the new state after a task, which has P as "projection".

        Args:
            state: of the task before; empty after the first task.
            moment: the sum of x x' over inputs x, float64 of shape (runs, ..., n, n).
            count: the number of samples; a sample has several inputs in a convolution.
        """


@dataclass(frozen=True)
class RadiusProjection:
    """A projection of each parameter into a ball around its anchor, whose radius is learned by gradient descent.

    Args:
        radius_lr: the learning rate of the radii, above 0; one number, or one per run.

    Attributes:
        validates: whether the radius is learned from a loss on other samples, after the optimizer's step; otherwise
            from the gradient of the next training batch.
    """

    radius_lr: Number
    validates: ClassVar[bool]

    def __post_init__(self) -> None:
        check_numbers("radius_lr", self.radius_lr, 0, above=True)
