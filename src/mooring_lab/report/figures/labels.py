"""Place labels next to points and lines without overlap."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mooring_lab.report.section import Array

_SLANTS = (35, 145, 90, 65, 115, 18, 162, 50, 130, 75, 105)
_ANGLES = np.deg2rad([0, 180, *(sign * angle for angle in _SLANTS for sign in (1, -1))])
"""The directions in which labels may stand, the usual ones first."""

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


def place_labels(
    points: Array, widths: Sequence[float], height: float, size: tuple[float, float], others: Array | None = None
) -> Array:
    """Return the centre of a label for each point that covers no other label and no marker; NaN if there is no room.

    A label belongs to one marker: it stands beside it, and clearly nearer to it than to any other, or a leader runs
    from the marker to the label. A leader keeps away from other markers, and its label is beside none of them.

    Labels take their best free positions, the first point first, and then move in turn to positions that have become
    better. Other orders follow, and the arrangement of lowest cost is returned. It leaves out few labels, and
    the last ones rather than the first.

    Args:
        points: positions in typographic points from the lower left corner, of shape (labels, 2).
        widths: the widths of the labels.
        height: the height of every label.
        size: the size of the area that holds the labels.
        others: positions of markers that get no label here, of shape (markers, 2).

    Returns:
        Centres of shape (labels, 2).

    Example:
        >>> place_labels(np.array([[50.0, 50.0]]), [20.0], 8.0, (100.0, 100.0)).tolist()
        [[67.0, 50.0]]
    """
    halves: Array = np.column_stack([np.array(widths) / 2, np.full(len(points), height / 2)])
    markers = points if others is None else np.concatenate([points, others])
    most = min(_MAX_POSITIONS, _MAX_TOTAL // max(1, len(points)))
    positions = [
        _positions(point, half, markers, size, most, _LEFT_OUT_COST * (len(points) - index))
        for index, (point, half) in enumerate(zip(points, halves, strict=True))
    ]
    if not positions:
        return np.empty((0, 2))
    counts = [len(cost) for _, _, cost in positions]
    middles, ends, costs = (np.concatenate(parts) for parts in zip(*positions, strict=True))
    owners = np.repeat(np.arange(len(points)), counts)
    choices = _arrange(costs, _conflicts(points[owners], ends, middles, halves[owners]), np.cumsum([0, *counts]))
    return np.asarray(middles[choices])


MARKER_RADIUS = 3.5
"""Half the width of the marker of a point, in typographic points."""

SAME_POINT = 2.0
"""Distance in typographic points within which markers coincide; they share a label."""

LEADER_TOUCHES, LEADER_CLEAR = 3.0, 4.5
"""Distance in typographic points from the centre of a marker at which a leader touches it, and is well away from it."""

OWNED_DISTANCE = 8.0
"""Distance in typographic points up to which a label seems to belong to a marker; further away it needs a leader."""

OWNERSHIP_MARGIN = 2.0
"""The margin by which a label without a leader is nearer to its own marker than to any other, in typographic points."""

LABEL_GAP = 4.0
"""Distance between labels in a row, in typographic points."""

_CLOSE_LEADER_COST = 100.0
_CONFLICT_COST = 120.0
"""The costs of a leader that is close to a marker, and of one that crosses another or runs below a label.

A cost is as if the label were this much further away.
"""

_OVERLAP_COST, _LEFT_OUT_COST = 240.0, 1000.0
"""The cost of labels that overlap for a while, and of a label that is left out."""

_MAX_POSITIONS, _MAX_TOTAL = 80, 2400
"""The largest number of positions of a label, and of all labels together: every pair of positions is compared."""

_ORDERS, _MAX_ROUNDS = 20, 10
"""How many orders and rounds of moves are tried."""

_OWN_DISTANCE = np.repeat(np.array(_RADII), len(_ANGLES))
_DISTANCE_COST = _OWN_DISTANCE + np.tile(0.4 * np.arange(len(_ANGLES)), len(_RADII))
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


def _positions(
    point: Array, half: Array, markers: Array, size: tuple[float, float], most: int, left_out: float
) -> tuple[Array, Array, Array]:
    """Return the best positions of a label among markers: their centres, the ends of their leaders and their costs.

    The last one is NaN, and costs as much as to leave the label out.
    """
    middles, ends = _around(point, half)
    foreign = markers[np.hypot(*(markers - point).T) >= SAME_POINT]
    gaps = np.maximum(np.abs(middles[:, None] - foreign) - half, 0)
    foreign_distance = np.hypot(gaps[..., 0], gaps[..., 1]).min(1, initial=np.inf)
    # Further away than this, the leader alone tells whose label it is.
    needed = np.minimum(_OWN_DISTANCE, 2 * OWNED_DISTANCE) + OWNERSHIP_MARGIN
    refused = ((middles < half) | (middles > np.array(size) - half)).any(1)
    refused |= _covers(middles, half, markers, MARKER_RADIUS).any(1)
    refused |= foreign_distance < np.where(_OWN_DISTANCE > OWNED_DISTANCE, OWNED_DISTANCE, needed)
    refused |= _leader_meets_marker(point, ends, foreign, LEADER_TOUCHES).any(1)
    costs = _DISTANCE_COST + 2 * np.maximum(needed - foreign_distance, 0)
    costs += _CLOSE_LEADER_COST * _leader_meets_marker(point, ends, foreign, LEADER_CLEAR).sum(1)
    allowed = np.flatnonzero(~refused)
    best = allowed[np.argsort(costs[allowed], kind="stable")[:most]]
    nowhere = np.full((1, 2), np.nan)
    return (
        np.concatenate([middles[best], nowhere]),
        np.concatenate([ends[best], nowhere]),
        np.append(costs[best], left_out),
    )


def _conflicts(points: Array, ends: Array, middles: Array, halves: Array) -> Array:
    """Return the cost of each position together with each other one: infinite if the labels overlap."""
    below = _leader_meets_box(points, ends, middles, halves)
    crossings = below + below.T + 1.0 * _leaders_cross(points, ends)
    overlaps = _covers(middles, halves[:, None] + (LABEL_GAP, 0), middles, halves)
    return np.where(overlaps, np.inf, _CONFLICT_COST * crossings)


def _arrange(costs: Array, conflicts: Array, bounds: NDArray[np.int_]) -> NDArray[np.int_]:
    """Return a position for each label, of low cost together with the conflicts between them.

    Args:
        costs: the cost of every position of every label.
        conflicts: the cost of each position with each position of another label; infinite where they overlap.
        bounds: where the positions of each label begin, and the end of the last.
    """
    labels, chance = len(bounds) - 1, np.random.default_rng(0)
    may_overlap = np.minimum(conflicts, _OVERLAP_COST)
    best, lowest = bounds[1:] - 1, np.inf
    for number in range(_ORDERS):
        order = chance.permutation(labels) if number else np.arange(labels)
        choices = bounds[1:] - 1
        # Labels that may overlap push each other away. Then they may not, and the last ones give way to the first.
        for stage, turns in ((may_overlap, order), (conflicts, range(labels - 1, -1, -1))):
            for _ in range(_MAX_ROUNDS):
                before = choices.copy()
                for label in turns:
                    own = slice(bounds[label], bounds[label + 1])
                    others = np.delete(choices, label)
                    choices[label] = own.start + np.argmin(costs[own] + stage[own, others].sum(1))
                if (choices == before).all():
                    break
        total = costs[choices].sum() + np.triu(conflicts[np.ix_(choices, choices)], 1).sum()
        if total < lowest:
            best, lowest = choices, total
    return best


def _covers(candidates: Array, half: Array, middles: Array, halves: Array | float) -> NDArray[np.bool_]:
    """Return which boxes overlap which of the others, of shape (boxes, others)."""
    gaps = np.abs(candidates[:, None] - middles) - half - halves
    return np.asarray((gaps < 0).all(2))


def _leader_meets_marker(start: Array, ends: Array, markers: Array, clearance: float) -> NDArray[np.bool_]:
    """Return which leaders come too near to which markers, of shape (leaders, markers).

    A marker may overlap the leader's own one. Then only a leader that comes nearer than its start is too near.
    """
    along, reach = ends - start, markers - start
    share = np.clip(along @ reach.T / (along**2).sum(1)[:, None], 0, 1)
    misses = reach - share[..., None] * along[:, None]
    allowed = np.minimum(clearance, np.hypot(*reach.T)) - 1e-9
    return np.asarray(np.hypot(misses[..., 0], misses[..., 1]) < allowed)


def _leader_meets_box(starts: Array, ends: Array, middles: Array, halves: Array) -> NDArray[np.bool_]:
    """Return which leaders run through which boxes, of shape (leaders, boxes)."""
    reach = np.abs(ends - starts)[:, None] / 2
    offset = ((starts + ends) / 2)[:, None] - middles
    # Neither an axis nor the normal of the leader separates the two.
    overlap = (np.abs(offset) < reach + halves).all(2)
    along = (ends - starts)[:, None]
    return np.asarray(overlap & (np.abs(_cross(along, offset)) < (2 * reach * halves[..., ::-1]).sum(-1)))


def _leaders_cross(starts: Array, ends: Array) -> NDArray[np.bool_]:
    """Return which leaders cross which of them, of shape (leaders, leaders)."""
    along = (ends - starts)[:, None]
    apart = _cross(along, starts - starts[:, None]) * _cross(along, ends - starts[:, None]) < 0
    return np.asarray(apart & apart.T)


def _cross(a: Array, b: Array) -> Array:
    """Return the cross products of vectors in the plane."""
    return np.asarray(a[..., 0] * b[..., 1] - a[..., 1] * b[..., 0])
