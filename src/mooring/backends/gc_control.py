"""Python's garbage collector, asked to wait, or to leave alone what stays."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

__all__ = ["gc_disabled", "gc_frozen"]

P = ParamSpec("P")
R = TypeVar("R")


def gc_disabled(function: Callable[P, R]) -> Callable[P, R]:
    """The same function, during which nothing is collected.

    A step that goes over thousands of tensors sets the collector off, and so do thousands of results that are read,
    though neither leaves any cycle behind.

    Example:
        >>> gc_disabled(gc.isenabled)(), gc.isenabled()
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


@contextmanager
def gc_frozen() -> Iterator[None]:
    """While this lasts, whatever is there already is left alone: what is collected is looked for among the new.

    Libraries bring along hundreds of thousands of objects that stay, and to look at each of them takes longer than to
    find what one fleet left behind.

    Example:
        >>> with gc_frozen():
        ...     gc.get_freeze_count() > 0
        True
    """
    if gc.get_freeze_count():  # somebody else has done so
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
