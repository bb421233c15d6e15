"""Python's garbage collector, asked to wait while thousands of small things are gone over."""

import gc
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

__all__ = ["uncollected"]

P = ParamSpec("P")
R = TypeVar("R")


def uncollected(function: Callable[P, R]) -> Callable[P, R]:
    """The same function, during which nothing is collected.

    A step that goes over thousands of tensors sets the collector off, and so do thousands of results that are read,
    though neither leaves any cycle behind.

    Example:
        >>> uncollected(gc.isenabled)(), gc.isenabled()
        (False, True)
    """

    @wraps(function)
    def waiting(*args: P.args, **kwargs: P.kwargs) -> R:
        if not gc.isenabled():
            return function(*args, **kwargs)
        gc.disable()
        try:
            return function(*args, **kwargs)
        finally:
            gc.enable()

    return waiting
