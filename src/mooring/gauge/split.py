"""Splits a reference into a gauge, which is only measured, and the rest, which importance is estimated on."""

from collections.abc import Sequence
from typing import Any

MIN_BATCHES = 4
"""With fewer batches than this there is nothing to hold out: all serve both purposes."""

EVERY = 3
"""One batch in so many is held out."""


def split_reference(batches: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return the batches of the gauge and the others; both have all if there are only a few.

    Example:
        >>> split_reference(range(7)), split_reference(range(2))
        (([0, 3, 6], [1, 2, 4, 5]), ([0, 1], [0, 1]))
    """
    if len(batches) < MIN_BATCHES:
        return list(batches), list(batches)
    held_out = list(batches[::EVERY])
    return held_out, [batch for index, batch in enumerate(batches) if index % EVERY]
