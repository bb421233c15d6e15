"""The frontier of a stream: every method swept over its dial, what it learned against what it kept."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from mooring.lab.methods import find_method
from mooring.lab.model.metrics import Interval, confidence_interval, paired_difference
from mooring.lab.model.results import Result
from mooring.lab.model.summary import Row

__all__ = ["NEAR", "Frontier", "Swept", "area", "dials", "frontiers", "hull"]

KINDS = {"soft": "explicit", "proximal": "curvature", "budget": "curvature"}
"""Methods that are variants of one another, by how their names begin."""

NEAR = 2.0
"""Points of accuracy that a good setting may be below the best one."""

Point = tuple[float, float]
"""What was kept, and what was learned; both in percent."""


def dials(methods: Sequence[str]) -> dict[str, tuple[float, ...]]:
    """The strengths that each method is swept over, for those that have one.

    Example:
        >>> dials(["plain", "wise-ft"])
        {'wise-ft': (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)}
    """
    return {name: find_method(name).dial for name in methods if find_method(name).has_strength}


def hull(points: Sequence[Point]) -> list[Point]:
    """The upper right of the convex hull: the points that no mixture of others beats, by what they kept.

    Example:
        >>> hull([(60.0, 90.0), (80.0, 70.0), (90.0, 80.0), (95.0, 60.0)])
        [(60.0, 90.0), (90.0, 80.0), (95.0, 60.0)]
    """
    found: list[Point] = []
    for point in sorted(set(points), key=lambda each: (each[0], each[1])):
        while len(found) > 1 and _turn(found[-2], found[-1], point) >= 0:
            found.pop()
        found.append(point)
    top = max(range(len(found)), key=lambda index: found[index][1], default=0)
    return found[top:]


def area(points: Sequence[Point]) -> float:
    """The area under the hull, in percent of all: 100 for a method that learns everything and keeps everything.

    Left of its first point the hull goes on level, right of its last one it falls to 0.

    Example:
        >>> area([(50.0, 80.0)]), area([(50.0, 80.0), (100.0, 80.0)])
        (40.0, 80.0)
    """
    ends = hull(points)
    if not ends:
        return 0.0
    edge = [(0.0, ends[0][1]), *ends]
    return math.fsum((right[0] - left[0]) * (left[1] + right[1]) / 2 for left, right in pairwise(edge)) / 100


def _turn(one: Point, two: Point, three: Point) -> float:
    """Above 0 where the way from one over two to three turns left."""
    return (two[0] - one[0]) * (three[1] - one[1]) - (two[1] - one[1]) * (three[0] - one[0])


@dataclass(frozen=True)
class Swept:
    """A method over its dial.

    Attributes:
        method: its name.
        rows: one for each strength, in their order.
    """

    method: str
    rows: tuple[Row, ...]

    @property
    def steady(self) -> list[Row]:
        """The rows of which every seed finished: a setting that breaks with some seed is none to choose."""
        return [row for row in self.rows if not row.unfinished]

    @property
    def best(self) -> Row | None:
        """The row with the highest mean accuracy, of those that every seed finished."""
        return max(self.steady, key=lambda row: row.metrics["accuracy"].mean, default=None)

    @property
    def good(self) -> tuple[float, float] | None:
        """The strengths around the best one, without a gap, that come near it; None where there is no dial."""
        if self.best is None or self.best.setting.strength is None:
            return None
        limit = self.best.metrics["accuracy"].mean - NEAR
        fine = [row in self.steady and row.metrics["accuracy"].mean >= limit for row in self.rows]
        low = high = self.rows.index(self.best)
        while low and fine[low - 1]:
            low -= 1
        while high + 1 < len(fine) and fine[high + 1]:
            high += 1
        return self.rows[low].setting.strength or 0.0, self.rows[high].setting.strength or 0.0

    @property
    def decades(self) -> float | None:
        """How wide the good range is, in powers of ten."""
        return None if self.good is None else math.log10(self.good[1] / self.good[0])

    @property
    def area(self) -> Interval | None:
        """The area under its hull over seeds, each seed with a hull of its own; None where nothing finished."""
        seeds = sorted({result.spec.seed for row in self.steady for result in row.results})
        found = [area([_point(r) for row in self.steady for r in row.results if r.spec.seed == seed]) for seed in seeds]
        return confidence_interval(found) if found else None

    def accuracies(self) -> dict[int, float]:
        """Of the best row, by seed."""
        return {} if self.best is None else {r.spec.seed: r.metrics["accuracy"] for r in self.best.results}


@dataclass(frozen=True)
class Frontier:
    """What methods reach on a stream.

    Attributes:
        stream: its name.
        swept: each method over its dial, the most accurate first.
    """

    stream: str
    swept: tuple[Swept, ...]

    @property
    def hull(self) -> list[tuple[Point, Row]]:
        """Who is on the frontier, by what was kept: the mean over seeds of steady rows of methods that keep no data."""
        rows = [row for each in self.swept if not _keeps_data(each.method) for row in each.steady]
        points = {_mean_point(row): row for row in rows}
        return [(point, points[point]) for point in hull(list(points))]

    def ahead(self, method: str) -> Interval | None:
        """Accuracy of a method's best setting minus that of the best method of another kind, seed by seed.

        Methods that keep data are no rivals, nor are those whose names begin alike.
        """
        rival = self.rival(method)
        mine = next((each for each in self.swept if each.method == method), None)
        if mine is None or mine.best is None or rival is None:
            return None
        ours, theirs = mine.accuracies(), rival.accuracies()
        common = sorted(ours.keys() & theirs.keys())
        return paired_difference([ours[s] for s in common], [theirs[s] for s in common]) if common else None

    def rival(self, method: str) -> Swept | None:
        """The most accurate method of another kind that keeps no data."""
        others = (e for e in self.swept if not _keeps_data(e.method) and _kind(e.method) != _kind(method))
        return next((each for each in others if each.best), None)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        told = []
        for each in self.swept:
            size = each.area
            told.append(
                {
                    "method": each.method,
                    "best": None if each.best is None else each.best.to_json(),
                    "good": each.good,
                    "decades": each.decades,
                    "area": None if size is None else vars(size),
                    "dial": [
                        {"strength": row.setting.strength, "verdict": row.verdict, **_means(row)} for row in each.rows
                    ],
                }
            )
        on = [{"kept": point[0], "learned": point[1], "row": row.label} for point, row in self.hull]
        return {"stream": self.stream, "methods": told, "hull": on}


def frontiers(rows: Sequence[Row]) -> list[Frontier]:
    """The frontier of each stream among rows, which every method may have several of.

    Args:
        rows: as `Study.compare` gives them, one for each strength.
    """
    found = []
    for stream in dict.fromkeys(row.setting.stream for row in rows):
        by_method: dict[str, list[Row]] = {}
        for row in rows:
            if row.setting.stream == stream:
                by_method.setdefault(row.setting.method, []).append(row)
        swept = [Swept(name, tuple(sorted(mine, key=_strength))) for name, mine in by_method.items()]
        swept.sort(key=lambda each: -each.best.metrics["accuracy"].mean if each.best else math.inf)
        found.append(Frontier(stream, tuple(swept)))
    return found


def _strength(row: Row) -> float:
    return row.setting.strength or 0.0


def _kind(method: str) -> str:
    begin = method.partition("-")[0]
    return KINDS.get(begin, begin)


def _keeps_data(method: str) -> bool:
    """Whether it sees more than the task at hand: it is shown, and on no frontier."""
    return find_method(method).data != "task"


def _point(result: Result) -> Point:
    return 100 - result.metrics["forgetting"], result.metrics["learned"]


def _mean_point(row: Row) -> Point:
    return 100 - row.metrics["forgetting"].mean, row.metrics["learned"].mean


def _means(row: Row) -> dict[str, float]:
    return {name: row.metrics[name].mean for name in ("accuracy", "forgetting", "learned") if name in row.metrics}
