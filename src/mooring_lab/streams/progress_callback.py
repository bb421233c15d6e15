"""Progress callbacks, called at a bounded rate."""

import time
from collections.abc import Callable

ProgressCallback = Callable[[str, int, int | None], None]
"""Called with a description of the work, the amount done, and the total amount (None if it is unknown)."""


def throttled(progress: ProgressCallback | None, interval: float = 0.1) -> ProgressCallback:
    """Return a callback that forwards to `progress`, if any: the first, the last, and one call per `interval` seconds.

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
