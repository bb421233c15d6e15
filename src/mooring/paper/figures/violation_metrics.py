"""Who violates lr * strength * importance < 1, and which runs broke: what the figure and the words share."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from mooring.lab.model.results import Result, Stability
from mooring.lab.model.summary import Row
from mooring.paper.context.scale import Case

__all__ = [
    "FALLEN",
    "Found",
    "after_first",
    "broke",
    "fell",
    "fewest_violations",
    "parameters_of",
    "share_violating",
    "violated",
    "violations_in",
]

FALLEN = 10.0
"""Points of accuracy below the clamped penalty from which a run that finished counts as fallen."""


@dataclass(frozen=True)
class Found:
    """What came of one method on one data set.

    Attributes:
        case: network, regime and data set.
        method: without clamping.
        rows: one for each strength, in order.
        clamped: the same strengths with importance capped at 1 / (lr * strength).
    """

    case: Case
    method: str
    rows: Sequence[Row]
    clamped: Sequence[Row]

    @property
    def first_violation(self) -> float:
        """The smallest strength at which a parameter of any seed reaches the bound after the first task."""
        return min(
            each.safe_strength for row in self.rows for each in map(after_first, row.results) if each is not None
        )

    @property
    def broken(self) -> Row | None:
        """The smallest strength at which a seed became unstable under the penalty; None where none did."""
        return next((row for row in self.rows if any(map(broke, row.results))), None)

    @property
    def fallen(self) -> list[Row]:
        """The strengths at which a seed finished far below its clamped self: it diverged, but not to infinity."""
        pairs = zip(self.rows, self.clamped, strict=True)
        return [row for row, clamped in pairs if any(map(fell, row.results, clamped.results))]


def after_first(result: Result) -> Stability | None:
    """The verdict after the first task; None where training broke before there was a penalty."""
    return result.stability[0] if result.stability else None


def broke(result: Result) -> bool:
    """Whether it became unstable under a penalty."""
    return result.status == "unstable" and bool(result.stability)


def fell(result: Result, clamped: Result) -> bool:
    """Whether it ended far below its clamped self; not so where either is not a number."""
    return result.metrics["accuracy"] < clamped.metrics["accuracy"] - FALLEN


def violations_in(told: Stability | None) -> int:
    """How many parameters are at 1 or beyond; those below 0 are another case."""
    return 0 if told is None else told.extrapolate + told.diverge - told.negative


def violated(result: Result) -> bool:
    """Whether a parameter violated the bound after any task that the run finished."""
    return any(map(violations_in, result.stability))


def parameters_of(told: Stability) -> int:
    """How many there are."""
    return told.free + told.interpolate + told.extrapolate + told.diverge


def share_violating(row: Row) -> float:
    """Parameters that violate the bound after the first task, in percent; mean over seeds."""
    told = [each for each in map(after_first, row.results) if each is not None]
    return fmean(100 * violations_in(each) / parameters_of(each) for each in told) if told else 0.0


def fewest_violations(row: Row) -> int:
    """Violations after the first task in the unstable run that had the fewest."""
    return min(violations_in(after_first(result)) for result in row.results if broke(result))
