"""A claim of the paper as a statement that runs decide."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mooring.lab.metrics import Interval, interval
from mooring.lab.results import Result
from mooring.lab.summary import Row

__all__ = ["Claim", "Verdict", "decided", "gain", "told"]

Verdict = Literal["holds", "does not hold", "not decided"]


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
        >>> decided(interval([1.0, 1.1, 0.9])), decided(interval([-1.0, -1.1, -0.9])), decided(interval([1.0, -1.0]))
        ('holds', 'does not hold', 'not decided')
    """
    if found is None or found.count < 2:
        return "not decided"
    return "holds" if found.low > 0 else "does not hold" if found.high < 0 else "not decided"


def gain(pairs: Sequence[tuple[Row, Row]], metric: str) -> Interval | None:
    """How much higher a metric is in the first of each pair, averaged over the pairs and taken seed by seed.

    Seeds that are not in every row finished are left out; None where none is left.

    Args:
        pairs: rows to compare.
        metric: a name of `Result.metrics`.
    """
    if not pairs:
        return None
    finished = [_finished(row) for pair in pairs for row in pair]
    seeds = sorted(set.intersection(*(set(each) for each in finished)))
    if not seeds:
        return None
    apart = []
    for seed in seeds:
        each = [_finished(a)[seed].metrics[metric] - _finished(b)[seed].metrics[metric] for a, b in pairs]
        apart.append(sum(each) / len(each))
    return interval(apart)


def told(found: Interval | None, form: str = "+.2f") -> str:
    """A number with its interval.

    Example:
        >>> told(interval([1.0, 2.0, 3.0])), told(None)
        ('+2.00 [-0.48, +4.48]', 'no seed finished everywhere')
    """
    if found is None:
        return "no seed finished everywhere"
    bounds = f" [{found.low:{form}}, {found.high:{form}}]" if found.count > 1 else ""
    return f"{found.mean:{form}}{bounds}"


def _finished(row: Row) -> dict[int, Result]:
    return {result.spec.seed: result for result in row.results if result.status == "finished"}
