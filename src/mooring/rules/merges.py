"""Rules that combine the importance of a finished task with that of the tasks before."""

from collections.abc import Callable

import torch
from torch import Tensor

from mooring.errors import unknown

Merge = Callable[[Tensor, Tensor], Tensor]
"""A rule (previous, current) -> previous, elementwise."""


def average(previous: Tensor, current: Tensor) -> Tensor:
    """Compute previous <- (previous + current) / 2, the paper's rule; the first task counts half too.

    Example:
        >>> average(torch.tensor([0.0, 4.0]), torch.tensor([2.0, 2.0]))
        tensor([1., 3.])
    """
    return (previous + current) / 2


def total(previous: Tensor, current: Tensor) -> Tensor:
    """Compute previous <- previous + current: every task has the same weight, and importance only grows.

    Example:
        >>> total(torch.tensor([1.0]), torch.tensor([2.0]))
        tensor([3.])
    """
    return previous + current


def maximum(previous: Tensor, current: Tensor) -> Tensor:
    """Compute previous <- max(previous, current): the largest importance over the tasks.

    Example:
        >>> maximum(torch.tensor([1.0, 5.0]), torch.tensor([2.0, 2.0]))
        tensor([2., 5.])
    """
    return torch.maximum(previous, current)


MERGES: dict[str, Merge] = {"average": average, "sum": total, "max": maximum}

PUBLIC_NAMES = {rule.__name__: name for name, rule in MERGES.items()}
"""The names that `resolve` takes, by the names of the functions, which older states contain."""


def resolve(merge: str | Merge) -> Merge:
    """Return the merge of that name, or the function itself.

    Example:
        >>> resolve("max") is maximum
        True
    """
    if callable(merge):
        return merge
    if not isinstance(merge, str) or merge not in MERGES:
        raise unknown("merge", merge, MERGES)
    return MERGES[merge]


def name_of(merge: Merge) -> str:
    """Return the name that `resolve` takes for a merge; of another function, its own name, or "" without one.

    Example:
        >>> name_of(total)
        'sum'
    """
    name = getattr(merge, "__name__", "")
    return PUBLIC_NAMES.get(name, name) if merge in MERGES.values() else name
