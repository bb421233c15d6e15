"""A progress bar on stderr."""

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
WIDTH = 24


def progress(items: Iterable[T], what: str, total: int | None, *, show: bool | None = None) -> Iterator[T]:
    """Iterate with a progress bar on stderr, which is cleared at the end.

    Args:
        items: what to iterate over.
        what: the name of the activity.
        total: the number of items; None if it is not known.
        show: whether to draw the bar; None draws it only on a terminal.

    Example:
        >>> list(progress("ab", "reading", 2))
        ['a', 'b']
    """
    if not (sys.stderr.isatty() if show is None else show):
        yield from items
        return
    start, length = time.monotonic(), 0

    def line(done: int) -> str:
        elapsed = time.monotonic() - start
        if not total:
            return f"{what} {done}, {elapsed:.0f} s"
        full = WIDTH * min(done, total) // total
        left = f", {elapsed / done * max(total - done, 0):.0f} s left" if done else ""
        return f"{what} [{'=' * full}{' ' * (WIDTH - full)}] {done}/{total}{left}"

    try:
        for done, item in enumerate(items):
            text = line(done)
            print(f"\r{text:<{length}}", end="", file=sys.stderr, flush=True)
            length = len(text)
            yield item
    finally:
        print(f"\r{'':<{length}}\r", end="", file=sys.stderr, flush=True)
