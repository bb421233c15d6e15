"""What a pull is: a force added to the gradient, or a rate at which a parameter returns to its anchor."""

from abc import ABC, abstractmethod

from torch import Tensor

from mooring.errors import check_number
from mooring.runs import Number

__all__ = ["GradientPull", "ParameterPull", "check_strength"]


class GradientPull(ABC):
    """A pull that acts before the optimizer's step: g <- g + force.

    A pull of your own is a subclass with `force`, passed to `mooring.attach` as an instance;
    `mooring.testing.check_pull` tells whether it keeps what Mooring promises.

    Example:
        >>> import torch
        >>> class Constant(GradientPull):
        ...     def force(self, previous, d, lr):
        ...         return previous * d.sign()
        >>> Constant().force(torch.tensor([2.0]), torch.tensor([-0.1]), lr=0.1)
        tensor([-2.])
    """

    @abstractmethod
    def force(self, previous: Tensor, d: Tensor, lr: Number) -> Tensor:
        """The force on a parameter, elementwise; 0 where `previous` is 0.

        Args:
            previous: the importance over past tasks.
            d: the displacement, theta - anchor, before the step.
            lr: the parameter's learning rate; one number, or one per run.
        """


class ParameterPull(ABC):
    """A pull that acts after the optimizer's step: theta <- theta + rate * (anchor - theta).

    A pull of your own is a subclass with `rate`.

    Example:
        >>> import torch
        >>> class Halfway(ParameterPull):
        ...     def rate(self, previous, current, lr):
        ...         return 0.5 * (previous > 0)
        >>> Halfway().rate(torch.tensor([0.0, 3.0]), torch.tensor([1.0, 1.0]), lr=0.1)
        tensor([0.0000, 0.5000])
    """

    every: int = 1
    """Act in each iteration, or only in each `every`-th of a task."""

    @abstractmethod
    def rate(self, previous: Tensor, current: Tensor, lr: Number) -> Tensor:
        """How far back to its anchor a parameter goes, elementwise: between 0 and 1, 0 where `previous` is 0.

        Args:
            previous: the importance over past tasks.
            current: the importance on this one.
            lr: the parameter's learning rate; one number, or one per run.
        """


def check_strength(strength: Number, name: str = "strength") -> None:
    """Refuse a strength that is negative, infinite or not a number; of a vector, each."""
    for value in strength.reshape(-1).tolist() if isinstance(strength, Tensor) else [strength]:
        check_number(name, value, 0)
