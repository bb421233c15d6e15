"""A claim of the paper as a statement that runs decide."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mooring.lab.model.metrics import Interval, confidence_interval
from mooring.lab.model.results import Result
from mooring.lab.model.summary import Row

__all__ = ["Claim", "Verdict", "by_seed", "decided", "gain", "gains", "share", "told", "whole", "within"]

Verdict = Literal["holds", "does not hold", "not decided"]
Score = str | Callable[[Result], float]
"""A metric of a run by name, or what computes one."""


@dataclass(frozen=True)
class Claim:
    """What the paper says, and what our runs say.

    Attributes:
        statement: the claim, in one sentence.
        definition: what is measured, and when it holds.
        ours: the number, with its interval where there is one.
        papers: the paper's number, where it gives one.
        verdict: "holds", "does not hold" or "not decided".
    """

    statement: str
    definition: str
    ours: str
    papers: str
    verdict: Verdict

    def to_row(self) -> dict[str, Any]:
        """For a table."""
        told = {"claim": self.statement, "holds when": self.definition, "ours": self.ours, "paper's": self.papers}
        return {**told, "verdict": self.verdict}


def decided(found: Interval | None) -> Verdict:
    """Whether something is above 0: by its 95 % interval; not decided where that holds 0, or there is none.

    Example:
        >>> samples = [1.0, 1.1, 0.9], [-1.0, -1.1, -0.9], [1.0, -1.0]
        >>> [decided(confidence_interval(values)) for values in samples]
        ['holds', 'does not hold', 'not decided']
    """
    if found is None or found.count < 2:
        return "not decided"
    return "holds" if found.low > 0 else "does not hold" if found.high < 0 else "not decided"


def within(found: Interval | None, low: float, high: float) -> Verdict:
    """Whether something lies between bounds: by its 95 % interval.

    Example:
        >>> found = confidence_interval([1.0, 1.1, 0.9])
        >>> within(found, 0, 2), within(found, 2, 3), within(found, 0, 1), within(None, 0, 1)
        ('holds', 'does not hold', 'not decided', 'not decided')
    """
    if found is None or found.count < 2:
        return "not decided"
    if low < found.low and found.high < high:
        return "holds"
    return "does not hold" if found.high < low or found.low > high else "not decided"


def share(found: int, of: int) -> Verdict:
    """Whether it is at least half of them; with none there is nothing to decide.

    Example:
        >>> share(2, 4), share(1, 4), share(0, 0)
        ('holds', 'does not hold', 'not decided')
    """
    return "not decided" if not of else "holds" if 2 * found >= of else "does not hold"


def every(found: int, of: int) -> Verdict:
    """The verdict on a claim about all of them.

    Example:
        >>> every(3, 3), every(2, 3), every(0, 0)
        ('holds', 'does not hold', 'not decided')
    """
    return "not decided" if not of else "holds" if found == of else "does not hold"


def by_seed(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Interval | None:
    """The mean over pairs of first minus second, for each seed that finished somewhere in both.

    Args:
        pairs: a value for each seed in both; not a number where a run did not finish.

    Example:
        >>> by_seed([([1.0, 2.0], [0.0, 0.0]), ([3.0, math.nan], [0.0, 0.0])]).mean
        2.0
    """
    apart: dict[int, list[float]] = defaultdict(list)
    for first, second in pairs:
        for seed, (one, other) in enumerate(zip(first, second, strict=True)):
            if math.isfinite(one) and math.isfinite(other):
                apart[seed].append(one - other)
    return confidence_interval([math.fsum(each) / len(each) for each in apart.values()]) if apart else None


def gain(pairs: Sequence[tuple[Row, Row]], metric: Score) -> Interval | None:
    """How much higher a metric is in the first of each pair, averaged over the pairs and taken seed by seed.

    Seeds that are not in every row finished are left out; None where none is left.

    Args:
        pairs: rows to compare.
        metric: a name of `Result.metrics`, or what computes another.
    """
    apart = list(gains(pairs, metric).values())
    return confidence_interval(apart) if apart else None


def whole(pairs: Sequence[tuple[Row, Row]]) -> list[tuple[Row, Row]]:
    """The pairs in which every run of both finished, whose mean is over the same seeds; all where there are none."""
    found = [pair for pair in pairs if all(r.status == "finished" for row in pair for r in row.results)]
    return found or list(pairs)


def gains(pairs: Sequence[tuple[Row, Row]], metric: Score) -> dict[int, float]:
    """The same for each seed."""
    each = [(_scores(a, metric), _scores(b, metric)) for a, b in pairs]
    seeds = sorted(set.intersection(*(set(scores) for pair in each for scores in pair))) if each else []
    return {seed: math.fsum(a[seed] - b[seed] for a, b in each) / len(each) for seed in seeds}


def told(found: Interval | None, form: str = "+.2f") -> str:
    """A number with its interval.

    Example:
        >>> told(confidence_interval([1.0, 2.0, 3.0])), told(None)
        ('+2.00 [-0.48, +4.48]', 'no seed finished everywhere')
    """
    if found is None:
        return "no seed finished everywhere"
    bounds = f" [{found.low:{form}}, {found.high:{form}}]" if found.count > 1 else ""
    return f"{found.mean:{form}}{bounds}"


def _scores(row: Row, metric: Score) -> dict[int, float]:
    """By seed, of the runs that finished."""
    finished = [result for result in row.results if result.status == "finished"]
    return {r.spec.seed: r.metrics[metric] if isinstance(metric, str) else metric(r) for r in finished}
