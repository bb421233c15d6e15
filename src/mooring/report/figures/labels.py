"""Place labels next to points and lines without overlap."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mooring.report.section import Array

_ANGLES = np.deg2rad([0, 180, 35, -35, 145, -145, 90, -90, 65, -65, 115, -115, 18, -18, 162, -162, 50, -50, 130, -130])
_RADII = (7.0, 10.0, 13.0, 16.0, 20.0, 24.0, 28.0, 33.0, 38.0, 44.0, 50.0, 57.0, 64.0, 72.0, 80.0, 90.0, 100.0, 125.0)


def spread_labels(wanted: Sequence[float], distance: float, top: float) -> list[float]:
    """Return heights close to the wanted ones, at least `distance` apart, from 0 to `top` if there is room.

    Example:
        >>> spread_labels([1.0, 1.0, 3.0], 0.5, 4.0)
        [0.75, 1.25, 3.0]
    """
    groups: list[tuple[float, list[int]]] = []
    for index in sorted(range(len(wanted)), key=lambda index: wanted[index]):
        groups.append((wanted[index], [index]))
        # Labels that would touch form a group around the mean of their wanted heights.
        while len(groups) > 1:
            (low, lower), (high, upper) = groups[-2:]
            both = lower + upper
            if high - low >= distance * len(both) / 2:
                break
            del groups[-2:]
            middle = (low * len(lower) + high * len(upper)) / len(both)
            half = distance * (len(both) - 1) / 2
            groups.append((max(min(middle, top - half), half), both))
    heights = [0.0] * len(wanted)
    for middle, members in groups:
        for number, index in enumerate(members):
            heights[index] = middle + distance * (number - (len(members) - 1) / 2)
    return heights


def place_labels(points: Array, widths: Sequence[float], height: float, size: tuple[float, float]) -> Array:
    """Return the centre of a label for each point that covers no other label and no point; NaN if there is no room.

    The search is greedy: the first point takes the nearest free position, so that the most important comes first.

    Args:
        points: positions in typographic points from the lower left corner, of shape (labels, 2).
        widths: the widths of the labels.
        height: the height of every label.
        size: the size of the area that holds the labels.

    Returns:
        Centres of shape (labels, 2).

    Example:
        >>> place_labels(np.array([[50.0, 50.0]]), [20.0], 8.0, (100.0, 100.0)).tolist()
        [[67.0, 50.0]]
    """
    halves: Array = np.column_stack([np.array(widths) / 2, np.full(len(points), height / 2)])
    markers = np.unique(points, axis=0)
    middles: Array = np.full_like(points, np.nan)
    leaders: Array = np.empty((0, 2))
    placed: list[int] = []
    for index, half in enumerate(halves):
        candidates, nearest = _around(points[index], half)
        lines = points[index] + _ALONG[:, None] * (nearest - points[index])[:, None]
        taken = ((candidates < half) | (candidates > np.array(size) - half)).any(1)
        taken |= _covers(candidates, half, markers, MARKER_RADIUS).any(1)
        taken |= _covers(candidates, half, middles[placed], halves[placed]).any(1)
        cost = _DISTANCE_COST + 8 * _covers(candidates, half, leaders, 1.0).sum(1)
        crossed = _covers(lines.reshape(-1, 2), np.zeros(2), middles[placed], halves[placed])
        cost += np.minimum(8 * crossed.sum(1).reshape(len(candidates), -1).sum(1), 100)
        best = int(np.argmin(np.where(taken, np.inf, cost)))
        if not taken[best]:
            middles[index] = candidates[best]
            leaders = np.concatenate([leaders, lines[best]])
            placed.append(index)
    return middles


MARKER_RADIUS = 3.5
"""Half the width of the marker of a point, in typographic points."""

_ALONG = np.linspace(0.25, 1.0, 6)
_DISTANCE_COST = np.repeat(np.array(_RADII), len(_ANGLES)) + np.tile(0.4 * np.arange(len(_ANGLES)), len(_RADII))
"""The cost of a position: its distance, and a little more for unusual directions."""


def _around(point: Array, half: Array) -> tuple[Array, Array]:
    """Return centres of labels around a point, and the edge or corner of each that is nearest to the point."""
    middles, nearest = [], []
    for radius in _RADII:
        for angle in _ANGLES:
            direction = np.array([math.cos(angle), math.sin(angle)])
            nearest.append(point + radius * direction)
            middles.append(nearest[-1] + half * np.where(abs(direction) < 0.3, 0, np.sign(direction)))
    return np.array(middles), np.array(nearest)


def _covers(candidates: Array, half: Array, middles: Array, halves: Array | float) -> NDArray[np.bool_]:
    """Return which boxes overlap which of the others, of shape (boxes, others)."""
    gaps = np.abs(candidates[:, None] - middles[None]) - half - halves
    return np.asarray((gaps < 0).all(2))
