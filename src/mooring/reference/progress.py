"""A line on stderr that says how far something is, where somebody looks at it."""

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

__all__ = ["progress"]

T = TypeVar("T")
WIDTH = 24


def progress(things: Iterable[T], what: str, total: int | None, *, show: bool | None = None) -> Iterator[T]:
    """The same things, with a bar on stderr that goes away at the end.

    Args:
        things: to go through.
        what: is being done.
        total: how many there are; None where nobody knows.
        show: whether to draw it; None only on a terminal.

    Example:
        >>> list(progress("ab", "reading", 2))
        ['a', 'b']
    """
    if not (sys.stderr.isatty() if show is None else show):
        yield from things
        return
    began, length = time.monotonic(), 0

    def line(done: int) -> str:
        spent = time.monotonic() - began
        if not total:
            return f"{what} {done}, {spent:.0f} s"
        full = WIDTH * min(done, total) // total
        left = f", {spent / done * max(total - done, 0):.0f} s left" if done else ""
        return f"{what} [{'=' * full}{' ' * (WIDTH - full)}] {done}/{total}{left}"

    try:
        for done, thing in enumerate(things):
            told = line(done)
            sys.stderr.write(f"\r{told:<{length}}")
            sys.stderr.flush()
            length = len(told)
            yield thing
    finally:
        sys.stderr.write(f"\r{'':<{length}}\r")
        sys.stderr.flush()
