"""Python's garbage collector, kept away from objects that stay."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_frozen() -> Iterator[None]:
    """Exempt all objects that exist now from garbage collection, inside this context.

    Libraries bring hundreds of thousands of objects that stay, and traversing them takes longer than finding what one
    fleet left behind.

    Example:
        >>> with gc_frozen():
        ...     gc.get_freeze_count() > 0
        True
    """
    if gc.get_freeze_count():  # an outer context did it
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
