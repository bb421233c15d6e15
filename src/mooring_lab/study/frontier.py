"""The frontier of a stream: every method swept over its dial, accuracy learned against accuracy kept.

The setting that stands for a method is chosen on held-out training images with other seeds than those that score it.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from mooring.errors import MooringError
from mooring_lab.methods import find_method
from mooring_lab.model.metrics import Interval, confidence_interval, paired_difference
from mooring_lab.model.results import Result
from mooring_lab.model.summary import Row
from mooring_lab.streams.slices import hold_out
from mooring_lab.streams.stream import Stream
from mooring_lab.study.comparison import Comparison
from mooring_lab.study.study import Study

FAMILIES = {"soft": "explicit", "proximal": "curvature", "budget": "curvature"}
"""The family of methods that are variants of one another, by the first part of their names."""

GOOD_POINTS = 2.0
"""How many points of accuracy a good setting may be below the best one."""

Point = tuple[float, float]
"""Accuracy kept and accuracy learned, both in percent."""


def dials(methods: Sequence[str]) -> dict[str, tuple[float, ...]]:
    """Return the strengths to sweep each method over, for the methods that have one.

    Example:
        >>> dials(["plain", "wise-ft"])
        {'wise-ft': (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)}
    """
    return {name: find_method(name).dial for name in methods if find_method(name).has_strength}


def upper_envelope(points: Sequence[Point]) -> list[Point]:
    """Return the upper right of the convex hull, by accuracy kept: the points that no mixture of others beats.

    Example:
        >>> upper_envelope([(60.0, 90.0), (80.0, 70.0), (90.0, 80.0), (95.0, 60.0)])
        [(60.0, 90.0), (90.0, 80.0), (95.0, 60.0)]
    """
    corners: list[Point] = []
    for point in sorted(set(points)):
        while len(corners) > 1 and _orientation(corners[-2], corners[-1], point) >= 0:
            corners.pop()
        corners.append(point)
    top = max(range(len(corners)), key=lambda index: corners[index][1], default=0)
    return corners[top:]


def area_under(points: Sequence[Point]) -> float:
    """Return the area under the envelope in percent: 100 for a method that learns and keeps everything.

    Left of its first point the envelope is level; right of its last point it is 0.

    Example:
        >>> area_under([(50.0, 80.0)]), area_under([(50.0, 80.0), (100.0, 80.0)])
        (40.0, 80.0)
    """
    corners = upper_envelope(points)
    edge = [(0.0, corners[0][1]), *corners] if corners else []
    return math.fsum((right[0] - left[0]) * (left[1] + right[1]) / 2 for left, right in pairwise(edge)) / 100


def _orientation(a: Point, b: Point, c: Point) -> float:
    """Return a positive number if the path from a over b to c turns left."""
    return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])


@dataclass(frozen=True)
class Sweep:
    """A method over its dial.

    Attributes:
        method: its name.
        rows: one for each strength, in ascending order.
        searched: the same strengths on held-out training images with other seeds; empty if there is only one strength.
    """

    method: str
    rows: tuple[Row, ...]
    searched: tuple[Row, ...] = ()

    def __post_init__(self) -> None:
        """Refuse several strengths without a search to choose one by."""
        if len(self.rows) > 1 and not self.searched:
            raise MooringError(f"{self.method} has {len(self.rows)} strengths: give the rows of a search to choose by")

    @property
    def name(self) -> str:
        """The name of the method in tables."""
        return self.rows[0].name

    @property
    def finished_rows(self) -> list[Row]:
        """The rows that every seed finished: a strength that fails with some seed is not to be chosen."""
        return [row for row in self.rows if not row.unfinished]

    @property
    def best(self) -> Row | None:
        """The row of the strength that was most accurate in the search, among those that every seed finished."""
        if not self.searched:
            return next(iter(self.finished_rows), None)
        finished = {row.setting.strength: row.metrics["accuracy"].mean for row in self.searched if not row.unfinished}
        eligible = [row for row in self.finished_rows if row.setting.strength in finished]
        return max(eligible, key=lambda row: finished[row.setting.strength], default=None)

    @property
    def good_range(self) -> tuple[float, float] | None:
        """The contiguous strengths around the best one that are nearly as good; None for a method without a dial."""
        if self.best is None or self.best.setting.strength is None:
            return None
        limit = self.best.metrics["accuracy"].mean - GOOD_POINTS
        finished = self.finished_rows
        is_good = [row in finished and row.metrics["accuracy"].mean >= limit for row in self.rows]
        low = high = self.rows.index(self.best)
        while low and is_good[low - 1]:
            low -= 1
        while high + 1 < len(is_good) and is_good[high + 1]:
            high += 1
        return self.rows[low].setting.strength or 0.0, self.rows[high].setting.strength or 0.0

    @property
    def decades(self) -> float | None:
        """The width of the good range, in powers of ten; None for a range that begins at 0, which has no such width."""
        good = self.good_range
        return None if good is None or good[0] == 0 else math.log10(good[1] / good[0])

    @property
    def area(self) -> Interval | None:
        """The area under the envelope over seeds, each seed with its own envelope; None if no row finished.

        Joint training has none: it keeps nothing and learns nothing later.
        """
        results = [result for row in self.finished_rows for result in row.results if not result.is_joint]
        seeds = sorted({result.spec.seed for result in results})
        areas = [area_under([_point(result) for result in results if result.spec.seed == seed]) for seed in seeds]
        return confidence_interval(areas).within(0, 100) if areas else None

    def accuracies(self) -> dict[int, float]:
        """Return the accuracies of the best row, by seed."""
        return {} if self.best is None else {r.spec.seed: r.metrics["accuracy"] for r in self.best.results}


@dataclass(frozen=True)
class Frontier:
    """What methods reach on a stream.

    Attributes:
        stream: its name and scenario.
        sweeps: each method over its dial, the most accurate first.
    """

    stream: str
    sweeps: tuple[Sweep, ...]

    @property
    def scenario(self) -> str:
        """The scenario: "task", "class" or "domain"."""
        return self.sweeps[0].rows[0].scenario

    @property
    def envelope(self) -> list[tuple[Point, Row]]:
        """The rows on the frontier by accuracy kept: means over seeds, of methods that keep no data.

        Rows that reach the same point are all on it, one after the other.
        """
        points: dict[Point, list[Row]] = {}
        for row in (row for sweep in self.sweeps if not _keeps_data(sweep.method) for row in sweep.finished_rows):
            point = (100 - row.metrics["forgetting"].mean, row.metrics["learned"].mean)
            points.setdefault(point, []).append(row)
        return [(point, row) for point in upper_envelope(list(points)) for row in points[point]]

    def lead(self, method: str) -> Interval | None:
        """Return the accuracy of a method's best setting minus that of its rival, seed by seed."""
        rival = self.rival(method)
        sweep = next((sweep for sweep in self.sweeps if sweep.method == method), None)
        if sweep is None or sweep.best is None or rival is None:
            return None
        ours, theirs = sweep.accuracies(), rival.accuracies()
        seeds = sorted(ours.keys() & theirs.keys())
        if not seeds:
            return None
        return paired_difference([ours[seed] for seed in seeds], [theirs[seed] for seed in seeds]).within(-100, 100)

    def rival(self, method: str) -> Sweep | None:
        """Return the most accurate method of another family that keeps no data."""
        others = (s for s in self.sweeps if not _keeps_data(s.method) and _family(s.method) != _family(method))
        return next((sweep for sweep in others if sweep.best), None)

    def to_json(self) -> dict[str, Any]:
        """Return the frontier as plain values."""
        methods = [
            {
                "method": sweep.method,
                "best": None if sweep.best is None else sweep.best.to_json(),
                "accuracies": sweep.accuracies(),
                "good": sweep.good_range,
                "decades": sweep.decades,
                "area": (area := sweep.area) and vars(area),
                "dial": [
                    {"strength": r.setting.strength, "chosen": r is sweep.best, "verdict": r.verdict, **_means(r)}
                    for r in sweep.rows
                ],
            }
            for sweep in self.sweeps
        ]
        corners = [{"kept": point[0], "learned": point[1], "row": row.label} for point, row in self.envelope]
        seeds = {"seeds": list(self.scored_seeds), "search_seeds": list(self.search_seeds)}
        return {"stream": self.stream, "scenario": self.scenario, **seeds, "methods": methods, "hull": corners}

    @property
    def scored_seeds(self) -> tuple[int, ...]:
        """The seeds that scored the strengths."""
        return _seeds(row for sweep in self.sweeps for row in sweep.rows)

    @property
    def search_seeds(self) -> tuple[int, ...]:
        """The seeds that chose the strengths; empty if there was nothing to choose."""
        return _seeds(row for sweep in self.sweeps for row in sweep.searched)


def sweep_frontiers(study: Study, asked: Comparison, search_seeds: Sequence[int]) -> list[Frontier]:
    """Train every method over its dial, and return the frontier of each stream.

    The strengths of a method are compared on held-out training images with `search_seeds`. All of them are then trained
    on every training image and scored on the test images, with the seeds of the comparison.

    Args:
        study: where results are kept.
        asked: the methods with their strengths, the streams and the seeds.
        search_seeds: the seeds that choose the strengths; none of them may be a seed of the comparison.
    """
    if both := sorted(set(asked.seeds) & set(search_seeds)):
        raise MooringError(
            f"seed {both[0]} would choose a strength and score it too: "
            "give other seeds to --search-seeds than to --seeds"
        )
    study.store.check_writable()
    streams: list[tuple[Stream, Any]] = [(study.open(source), training) for source, training in asked.streams]
    asked = replace(asked, streams=tuple(streams))
    swept = {name: strengths for name, strengths in asked.strength.items() if len(strengths) > 1}
    searched: list[Row] = []
    if swept:
        held_out = tuple((hold_out(stream), training) for stream, training in streams)
        lr = {name: lrs for name, lrs in asked.lr.items() if name in swept}
        search = replace(
            asked, streams=held_out, methods=tuple(swept), seeds=tuple(search_seeds), lr=lr, strength=swept
        )
        names = {held.name: stream.name for (held, _), (stream, _) in zip(held_out, streams, strict=True)}
        rows = study.compare(search)
        searched = [replace(row, setting=replace(row.setting, stream=names[row.setting.stream])) for row in rows]
    return build_frontiers(study.compare(asked), searched)


def build_frontiers(rows: Sequence[Row], searched: Sequence[Row] = ()) -> list[Frontier]:
    """Return the frontier of each stream.

    Args:
        rows: as `Study.compare` returns them, one for each method at each strength.
        searched: the same of the search, for methods with several strengths.
    """
    frontiers = []
    for stream in dict.fromkeys(row.stream for row in rows):
        scored, chosen = (_by_method(part, stream) for part in (rows, searched))
        sweeps = [Sweep(name, group, chosen.get(name, ())) for name, group in scored.items()]
        sweeps.sort(key=lambda sweep: -sweep.best.metrics["accuracy"].mean if sweep.best else math.inf)
        frontiers.append(Frontier(stream, tuple(sweeps)))
    return frontiers


def _seeds(rows: Iterable[Row]) -> tuple[int, ...]:
    return tuple(sorted({result.spec.seed for row in rows for result in row.results}))


def _by_method(rows: Sequence[Row], stream: str) -> dict[str, tuple[Row, ...]]:
    """Return the rows of a stream by method, each sorted by strength."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row.stream == stream:
            groups.setdefault(row.setting.method, []).append(row)
    return {name: tuple(sorted(group, key=lambda row: row.setting.strength or 0.0)) for name, group in groups.items()}


def _family(method: str) -> str:
    prefix = method.partition("-")[0]
    return FAMILIES.get(prefix, prefix)


def _keeps_data(method: str) -> bool:
    """Return whether a method sees data of other tasks; it is shown, but is not on the frontier."""
    return find_method(method).memory is not None or find_method(method).all_tasks


def _point(result: Result) -> Point:
    return 100 - result.metrics["forgetting"], result.metrics["learned"]


def _means(row: Row) -> dict[str, float]:
    return {name: row.metrics[name].mean for name in ("accuracy", "forgetting", "learned") if name in row.metrics}
