"""Base classes of pulls, a force on the gradient or a rate of return to the anchor, and options with a run axis."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from torch import Tensor

from mooring.errors import MooringError, check_number, check_whole

Number = float | Tensor
"""A learning rate or a strength: one number, or a vector with one per run."""

Every = int | Literal["task"]
"""When a pull acts: in each `every`-th iteration of a task, or once at its end."""


class GradientPull(ABC):
    """A pull that acts before the optimizer's step: g <- g + force.

    To define a pull, write a subclass with `force`, and pass an instance to `mooring.attach`. Test it with
    `mooring.testing.check_pull`.

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
        """Return the force on a parameter, elementwise; 0 where `previous` is 0.

        Args:
            previous: the importance over past tasks.
            d: the displacement, theta - anchor, before the step.
            lr: the parameter's learning rate; one number, or one per run.
        """


class ParameterPull(ABC):
    """A pull that acts after the optimizer's step: theta <- theta + rate * (anchor - theta).

    To define a pull, write a subclass with `rate`.

    Example:
        >>> import torch
        >>> class Halfway(ParameterPull):
        ...     def rate(self, previous, current, lr):
        ...         return 0.5 * (previous > 0)
        >>> Halfway().rate(torch.tensor([0.0, 3.0]), torch.tensor([1.0, 1.0]), lr=0.1)
        tensor([0.0000, 0.5000])
    """

    every: Every = 1
    """Act in each `every`-th iteration of a task or, with "task", once when the task is consolidated."""

    reads_current: ClassVar[bool] = True
    """Whether `rate` depends on `current`; if not, `mooring.Memory` can drop it."""

    @abstractmethod
    def rate(self, previous: Tensor, current: Tensor, lr: Number) -> Tensor:
        """Return the rate of the return to the anchor, elementwise: between 0 and 1, and 0 where `previous` is 0.

        Args:
            previous: the importance over past tasks.
            current: the importance on the current task.
            lr: the parameter's learning rate; one number, or one per run.
        """


def learning_rate(group: Mapping[str, Any], reader: str = "") -> Number:
    """Return the learning rate of an optimizer's group; 1 if it has none, and so moves by the gradient itself.

    Args:
        group: the group. Its rate may be None, if the optimizer chooses it, as Adafactor does.
        reader: the name of the rule that needs the rate; it is then refused if it is None.

    Example:
        >>> learning_rate({"lr": 0.1}), learning_rate({}), learning_rate({"lr": None})
        (0.1, 1.0, 1.0)
    """
    if (lr := group.get("lr", 1.0)) is None:
        if reader:
            raise MooringError(
                f"{reader} needs a learning rate, and the optimizer's is None; nothing was changed: give the optimizer "
                "lr=, or use Interpolation() or Budget(...)"
            )
        return 1.0
    return lr  # type: ignore[no-any-return]


def per_run(value: Number, like: Tensor) -> Number:
    """Reshape a vector of shape (runs,) to (runs, 1, ..., 1), so that it broadcasts over `like` of shape (runs, ...).

    A number or a 0-d tensor is returned as it is.

    Example:
        >>> import torch
        >>> per_run(torch.tensor([0.1, 0.2]), torch.zeros(2, 3, 5)).shape
        torch.Size([2, 1, 1])
    """
    if isinstance(value, Tensor) and value.ndim == 1:
        return value.reshape(-1, *(1,) * (like.ndim - 1))
    return value


def check_every(every: Every) -> None:
    """Refuse anything but a whole number from 1, or "task"."""
    if isinstance(every, str) and every != "task":
        raise MooringError(f'every={every!r} is not allowed: give a number of iterations, or "task"')
    if every != "task":
        check_whole("every", every, 1)


def check_numbers(name: str, value: Number, low: float, high: float = math.inf, *, above: bool = False) -> None:
    """Refuse a number outside its range; a vector is checked element by element."""
    for number in value.reshape(-1).tolist() if isinstance(value, Tensor) else [value]:
        check_number(name, number, low, high, above=above)
