"""A claim of the paper as a statement that runs can confirm or refute."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mooring.lab.model.metrics import Interval, confidence_interval
from mooring.lab.model.results import Result
from mooring.lab.model.summary import Row
from mooring.paper.context.seed_statistics import format_difference

__all__ = [
    "Claim",
    "MetricOfRun",
    "RowPair",
    "Verdict",
    "all_verdict",
    "describe",
    "finished_pairs",
    "gains_by_seed",
    "majority_verdict",
    "mean_gain",
    "range_verdict",
    "sign_verdict",
]

Verdict = Literal["holds", "does not hold", "not decided"]
RowPair = tuple[Row, Row]
MetricOfRun = str | Callable[[Result], float]
"""A name of `Result.metrics`, or a function that computes a metric of a run."""


@dataclass(frozen=True)
class Claim:
    """A claim of the paper and the verdict of our runs.

    Attributes:
        statement: the claim, in one sentence.
        definition: what is measured, and when the claim holds.
        ours: our number, with its interval if it has one.
        papers: the paper's number, if it gives one.
        verdict: "holds", "does not hold" or "not decided".
    """

    statement: str
    definition: str
    ours: str
    papers: str
    verdict: Verdict

    def to_row(self) -> dict[str, Any]:
        """Return the claim as a row of a table."""
        return {
            "claim": self.statement,
            "holds when": self.definition,
            "ours": self.ours,
            "paper's": self.papers,
            "verdict": self.verdict,
        }


def sign_verdict(difference: Interval | None) -> Verdict:
    """Return whether a difference is positive; not decided if its 95 % interval contains 0 or there is none.

    Example:
        >>> [sign_verdict(confidence_interval(values)) for values in ([1.0, 1.1, 0.9], [-1.0, -1.1, -0.9], [1.0, -1.0])]
        ['holds', 'does not hold', 'not decided']
    """
    return range_verdict(difference, 0.0, math.inf)


def range_verdict(difference: Interval | None, low: float, high: float) -> Verdict:
    """Return whether a difference lies between bounds; not decided if its 95 % interval contains a bound.

    Example:
        >>> difference = confidence_interval([1.0, 1.1, 0.9])
        >>> [range_verdict(difference, low, high) for low, high in ((0, 2), (2, 3), (0, 1))]
        ['holds', 'does not hold', 'not decided']
        >>> range_verdict(None, 0, 1)
        'not decided'
    """
    if difference is None or difference.count < 2:
        return "not decided"
    if low < difference.low and difference.high < high:
        return "holds"
    return "does not hold" if difference.high < low or difference.low > high else "not decided"


def majority_verdict(count: int, total: int) -> Verdict:
    """Return the verdict on a claim about at least half of the runs; not decided if there are none.

    Example:
        >>> majority_verdict(2, 4), majority_verdict(1, 4), majority_verdict(0, 0)
        ('holds', 'does not hold', 'not decided')
    """
    return "not decided" if not total else "holds" if 2 * count >= total else "does not hold"


def all_verdict(count: int, total: int) -> Verdict:
    """Return the verdict on a claim about all runs; not decided if there are none.

    Example:
        >>> all_verdict(3, 3), all_verdict(2, 3), all_verdict(0, 0)
        ('holds', 'does not hold', 'not decided')
    """
    return "not decided" if not total else "holds" if count == total else "does not hold"


def gains_by_seed(pairs: Sequence[RowPair], metric: MetricOfRun) -> dict[int, float]:
    """Return by seed how much higher a metric is in the first row, averaged over pairs.

    Only seeds that finished in every row count.

    Args:
        pairs: rows to compare.
        metric: the metric of a run.
    """
    values = [(_values_by_seed(first, metric), _values_by_seed(second, metric)) for first, second in pairs]
    seeds = sorted(set.intersection(*(set(row) for pair in values for row in pair))) if values else []
    return {seed: math.fsum(a[seed] - b[seed] for a, b in values) / len(values) for seed in seeds}


def mean_gain(pairs: Sequence[RowPair], metric: MetricOfRun) -> Interval | None:
    """Return the mean of `gains_by_seed`; None if no seed finished in every row."""
    gains = list(gains_by_seed(pairs, metric).values())
    return confidence_interval(gains) if gains else None


def finished_pairs(pairs: Sequence[RowPair]) -> list[RowPair]:
    """Return the pairs in which every run finished, which have the same seeds; all pairs if there are none."""
    finished = [pair for pair in pairs if all(r.status == "finished" for row in pair for r in row.results)]
    return finished or list(pairs)


def describe(difference: Interval | None, spec: str = "+.2f") -> str:
    """Return a difference with its 95 % interval, as text.

    Example:
        >>> describe(confidence_interval([1.0, 2.0, 3.0])), describe(None)
        ('+2.00 [-0.48, +4.48]', 'no seed finished everywhere')
    """
    return format_difference(difference, spec) or "no seed finished everywhere"


def _values_by_seed(row: Row, metric: MetricOfRun) -> dict[int, float]:
    """Return a metric of the runs that finished, by seed."""
    finished = [result for result in row.results if result.status == "finished"]
    return {r.spec.seed: r.metrics[metric] if isinstance(metric, str) else metric(r) for r in finished}
