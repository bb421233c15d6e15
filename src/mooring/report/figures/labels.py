"""Labels beside what they name, without lying on each other."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mooring.report.section import Array

__all__ = ["apart", "place"]

_ANGLES = np.deg2rad([0, 180, 35, -35, 145, -145, 90, -90, 65, -65, 115, -115])
_RADII = (7.0, 13.0, 20.0, 28.0, 38.0, 50.0, 64.0, 80.0, 100.0, 125.0, 150.0)


def apart(wanted: Sequence[float], least: float, top: float) -> list[float]:
    """Heights near the wanted ones, at least so far from each other, and from 0 to `top` where there is room.

    Example:
        >>> apart([1.0, 1.0, 3.0], 0.5, 4.0)
        [0.75, 1.25, 3.0]
    """
    groups: list[tuple[float, list[int]]] = []
    for index in sorted(range(len(wanted)), key=lambda index: wanted[index]):
        groups.append((wanted[index], [index]))
        # Neighbours that would touch move together, around the middle of what they want.
        while len(groups) > 1 and groups[-1][0] - groups[-2][0] < least * (len(groups[-1][1]) + len(groups[-2][1])) / 2:
            (high, upper), (low, lower) = groups.pop(), groups.pop()
            both = lower + upper
            middle = (low * len(lower) + high * len(upper)) / len(both)
            half = least * (len(both) - 1) / 2
            groups.append((max(min(middle, top - half), half), both))
    found = [0.0] * len(wanted)
    for middle, members in groups:
        for number, index in enumerate(members):
            found[index] = middle + least * (number - (len(members) - 1) / 2)
    return found


def place(points: Array, widths: Sequence[float], height: float, size: tuple[float, float]) -> Array:
    """The middle of a label for each point, where it covers no other label, no point and no line to a label.

    Greedy: the most crowded point chooses first, the nearest free place around it.

    Args:
        points: in typographic points from the lower left corner, of shape (labels, 2).
        widths: of the labels.
        height: of every label.
        size: of the area they must stay in.

    Returns:
        Middles of shape (labels, 2).

    Example:
        >>> place(np.array([[50.0, 50.0]]), [20.0], 8.0, (100.0, 100.0)).tolist()
        [[67.0, 50.0]]
    """
    distances = np.hypot(*(points[:, None] - points[None]).transpose(2, 0, 1))
    crowded = np.argsort(-(distances < 40).sum(1), kind="stable")
    halves: Array = np.column_stack([np.array(widths) / 2, np.full(len(points), height / 2)])
    middles: Array = points.copy()
    leaders: Array = np.empty((0, 2))
    placed: list[int] = []
    for index in crowded:
        half = halves[index]
        tried, near = _around(points[index], half)
        lines = points[index] + _ALONG[:, None] * (near - points[index])[:, None]
        cost = _FAR + 1e4 * ((tried < half) | (tried > np.array(size) - half)).any(1)
        cost += 30 * _covers(tried, half, np.unique(points, axis=0), 3.5).sum(1)
        cost += 500 * _covers(tried, half, middles[placed], halves[placed]).sum(1)
        cost += 8 * _covers(tried, half, leaders, 1.0).sum(1)
        crossed = _covers(lines.reshape(-1, 2), np.zeros(2), middles[placed], halves[placed])
        cost += np.minimum(8 * crossed.sum(1).reshape(len(tried), -1).sum(1), 100)
        best = int(np.argmin(cost))
        middles[index] = tried[best]
        leaders = np.concatenate([leaders, lines[best]])
        placed.append(int(index))
    return middles


_ALONG = np.linspace(0.25, 1.0, 6)
_FAR = np.repeat(np.array(_RADII), len(_ANGLES)) + np.tile(0.4 * np.arange(len(_ANGLES)), len(_RADII))
"""What a place costs by itself: how far it is, and a little for being less usual."""


def _around(point: Array, half: Array) -> tuple[Array, Array]:
    """Middles of labels around a point, and their nearest edge or corner, on circles around it."""
    middles, near = [], []
    for radius in _RADII:
        for angle in _ANGLES:
            direction = np.array([math.cos(angle), math.sin(angle)])
            near.append(point + radius * direction)
            middles.append(near[-1] + half * np.where(abs(direction) < 0.3, 0, np.sign(direction)))
    return np.array(middles), np.array(near)


def _covers(tried: Array, half: Array, middles: Array, halves: Array | float) -> NDArray[np.bool_]:
    """Which of the boxes tried overlap which of the others, of shape (tried, others)."""
    gaps = np.abs(tried[:, None] - middles[None]) - half - halves
    return np.asarray((gaps < 0).all(2))
