"""Splits a reference into a gauge, which is only measured, and the rest, which importance is estimated on."""

from collections.abc import Sequence
from typing import Any

import torch

from mooring.reference.pass_cost import rows_of, samples_of

MIN_BATCHES = 4
"""Fewer batches than this are split by their rows."""

EVERY = 3
"""One batch, or one row, in so many is held out."""

MIN_ROWS = 16
"""The fewest rows that are held out; with fewer, all of a reference serves both purposes."""


def split_reference(batches: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return the batches of the gauge and the others; a few batches are split by their rows.

    Both have all of the reference if it is too small, or has batches without rows.

    Example:
        >>> gauge, others = split_reference([torch.arange(48)])
        >>> gauge[0][:4], others[0][:4]
        (tensor([0, 3, 6, 9]), tensor([1, 2, 4, 5]))
    """
    if len(batches) >= MIN_BATCHES:
        return split_batches(batches)
    counts = [samples_of(batch) for batch in batches]
    if min(counts, default=0) < EVERY or sum(counts) < EVERY * MIN_ROWS:
        return list(batches), list(batches)
    rows = [torch.arange(count) for count in counts]
    held_out = [rows_of(batch, index[::EVERY]) for batch, index in zip(batches, rows, strict=True)]
    return held_out, [rows_of(batch, index[index % EVERY > 0]) for batch, index in zip(batches, rows, strict=True)]


def split_batches(batches: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return the batches of the gauge and the others; both have all if there are only a few.

    Example:
        >>> split_batches(range(7)), split_batches(range(2))
        (([0, 3, 6], [1, 2, 4, 5]), ([0, 1], [0, 1]))
    """
    if len(batches) < MIN_BATCHES:
        return list(batches), list(batches)
    held_out = list(batches[::EVERY])
    return held_out, [batch for index, batch in enumerate(batches) if index % EVERY]
