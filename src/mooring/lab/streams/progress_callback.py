"""How long work tells what it has done: one call, at a bounded rate."""

import time
from collections.abc import Callable

__all__ = ["ProgressCallback", "throttled"]

ProgressCallback = Callable[[str, int, int | None], None]
"""Told what is being done, how much of it is done, and how much there is where that is known."""


def throttled(progress: ProgressCallback | None, interval: float = 0.1) -> ProgressCallback:
    """The same, called no more often than every `interval` seconds; the first and last of each thing always come.

    Args:
        progress: what to call; None for nothing.
        interval: in seconds.

    Example:
        >>> report = throttled(lambda what, done, total: print(what, done, "of", total), interval=60)
        >>> for done in range(4):
        ...     report("decoding", done, 3)
        decoding 0 of 3
        decoding 3 of 3
    """
    last: dict[str, float] = {}

    def report(what: str, done: int, total: int | None) -> None:
        now = time.monotonic()
        if progress is not None and (done == total or now - last.get(what, -interval) >= interval):
            last[what] = now
            progress(what, done, total)

    return report
