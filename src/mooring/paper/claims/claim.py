"""A claim of the paper as a statement that runs can confirm or refute."""

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Literal

from mooring.lab.model.metrics import Interval, confidence_interval
from mooring.lab.model.results import Result
from mooring.lab.model.summary import Row
from mooring.paper.context.seed_statistics import format_difference

Verdict = Literal["holds", "does not hold", "not decided"]
RowPair = tuple[Row, Row]
MetricOfRun = str | Callable[[Result], float]
"""A name of `Result.metrics`, or a function that computes a metric of a run."""

COLUMNS = ("claim", "holds when", "ours", "paper's", "verdict")


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

    def to_row(self) -> dict[str, str]:
        """Return the claim as a row of a table."""
        return dict(zip(COLUMNS, astuple(self), strict=True))


def claim_on_difference(
    statement: str,
    definition: str,
    difference: Interval | None,
    papers: str = "",
    *,
    low: float = 0.0,
    high: float = math.inf,
    spec: str = "+.2f",
) -> Claim:
    """Return a claim that a difference lies between bounds; by default, that it is positive."""
    return Claim(statement, definition, describe(difference, spec), papers, range_verdict(difference, low, high))


def claim_on_count(
    statement: str,
    definition: str,
    count: int,
    total: int,
    papers: str = "all",
    *,
    share: float = 1.0,
    details: str = "",
) -> Claim:
    """Return a claim about at least a share of the runs; by default, about all of them."""
    return Claim(statement, definition, f"{count} of {total}{details}", papers, count_verdict(count, total, share))


def range_verdict(difference: Interval | None, low: float = 0.0, high: float = math.inf) -> Verdict:
    """Return whether a difference lies between bounds; not decided if its 95 % interval contains a bound.

    Example:
        >>> [range_verdict(confidence_interval(x)) for x in ([1.0, 1.1, 0.9], [-1.0, -1.1, -0.9], [1.0, -1.0])]
        ['holds', 'does not hold', 'not decided']
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


def count_verdict(count: int, total: int, share: float = 1.0) -> Verdict:
    """Return the verdict on a claim about at least a share of the runs; not decided if there are none.

    Example:
        >>> count_verdict(2, 4, 0.5), count_verdict(1, 4, 0.5), count_verdict(0, 0, 0.5)
        ('holds', 'does not hold', 'not decided')
        >>> count_verdict(3, 3), count_verdict(2, 3), count_verdict(0, 0)
        ('holds', 'does not hold', 'not decided')
    """
    return "not decided" if not total else "holds" if count >= share * total else "does not hold"


def gains_by_seed(pairs: Sequence[RowPair], metric: MetricOfRun) -> dict[int, float]:
    """Return by seed how much higher a metric is in the first row, averaged over pairs.

    Only seeds that finished in every row count.
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
    finished = [result for result in row.results if result.status == "finished"]
    return {r.spec.seed: r.metrics[metric] if isinstance(metric, str) else metric(r) for r in finished}
