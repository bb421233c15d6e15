"""Statistics over seeds: rows, differences and their text."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import fmean

from mooring_lab.model.metrics import Interval, confidence_interval
from mooring_lab.model.results import Result
from mooring_lab.model.summary import Row, summarize


def summarize_seeds(results: Iterable[Result]) -> list[Row]:
    """Return one row for each setting, also where seeds start from different backbones; results are unchanged.

    Example:
        >>> from mooring_lab.model.spec import RunSpec
        >>> specs = [RunSpec("digits", "0", "si", seed, strength=1.0, init="ab"[seed]) for seed in (0, 1)]
        >>> [row] = summarize_seeds(Result(spec, "finished", "", [10.0], [[90.0]]) for spec in specs)
        >>> [result.spec.init for result in row.results]
        ['a', 'b']
    """
    known = {replace(result.spec, init=""): result for result in results}
    rows = summarize(replace(result, spec=spec) for spec, result in known.items())
    return [replace(row, results=tuple(known[result.spec] for result in row.results)) for row in rows]


def unstable_count(row: Row) -> int:
    """Return how many seeds of a row became unstable."""
    return sum(result.status == "unstable" for result in row.results)


def metric_values(results: Sequence[Result], name: str) -> list[float]:
    """Return a metric of each run; NaN for runs that did not finish."""
    return [result.metrics[name] for result in results]


def seed_interval(results: Sequence[Result], name: str) -> Interval | None:
    """Return the interval of a metric over the seeds that finished; None if none did."""
    values = [value for value in metric_values(results, name) if math.isfinite(value)]
    return confidence_interval(values) if values else None


def format_mean(results: Sequence[Result], name: str) -> str | None:
    """Return the mean of a metric over the seeds that finished, as text; None if none did."""
    interval = seed_interval(results, name)
    return None if interval is None else str(interval)


def mean_difference(*pairs: tuple[Sequence[float], Sequence[float]]) -> Interval | None:
    """Return the mean over pairs of first minus second, by seed; None if no seed finished in both of any pair.

    Args:
        pairs: two lists with one value for each seed; NaN for runs that did not finish. A seed is averaged over the
            pairs in which both values are finite.

    Example:
        >>> mean_difference(([1.0, 2.0], [0.0, 0.0]), ([3.0, math.nan], [0.0, 0.0])).mean
        2.0
    """
    differences: dict[int, list[float]] = defaultdict(list)
    for pair in pairs:
        for seed, (first, second) in enumerate(zip(*pair, strict=True)):
            if math.isfinite(first) and math.isfinite(second):
                differences[seed].append(first - second)
    means = list(map(fmean, differences.values()))
    return confidence_interval(means) if means else None


def format_difference(difference: Interval | None, spec: str = "+.2f") -> str | None:
    """Return a difference with its 95 % interval, as text; None if there is no difference.

    Example:
        >>> format_difference(confidence_interval([1.0, 2.0, 3.0])), format_difference(confidence_interval([1.0]))
        ('+2.00 [-0.48, +4.48]', '+1.00')
    """
    return None if difference is None else difference.as_difference(spec)
