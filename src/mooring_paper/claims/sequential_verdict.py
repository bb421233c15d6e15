"""Verdicts on a difference over seeds, with more seeds as long as those so far do not decide."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from mooring_lab.model.metrics import Interval, confidence_interval

Verdict = Literal["holds", "does not hold", "not decided"]

ERROR_RATE = 0.05
"""The largest probability that a claim is decided although the true difference is its bound."""

SEEDS_PER_LOOK = 5
"""Seeds that are added at a time."""


@dataclass(frozen=True)
class LookSchedule:
    """The numbers of seeds at which a difference is looked at.

    A verdict may be reached at any look, so each look has a part of the error rate (Bonferroni). With one look, the
    interval is the usual one of 95 %.

    Attributes:
        seeds: the numbers, in ascending order.

    Example:
        >>> looks = LookSchedule.between(5, 20)
        >>> looks.seeds, round(looks.confidence(), 6), round(looks.confidence(comparisons=2), 6)
        ((5, 10, 15, 20), 0.9875, 0.99375)
        >>> LookSchedule.between(2, 4).seeds, LookSchedule.between(5, 5).confidence()
        ((2, 4), 0.95)
    """

    seeds: tuple[int, ...]

    @classmethod
    def between(cls, first: int, last: int) -> "LookSchedule":
        """Return looks from the first number of seeds to the last, in steps of `SEEDS_PER_LOOK`."""
        return cls((*range(first, last, SEEDS_PER_LOOK), max(first, last)))

    def confidence(self, comparisons: int = 1) -> float:
        """Return the confidence of an interval such that those of all looks and comparisons hold together at 95 %."""
        return 1 - ERROR_RATE / (len(self.seeds) * comparisons)


@dataclass(frozen=True)
class Decision:
    """The verdict on a difference.

    Attributes:
        verdict: "holds", "does not hold" or "not decided".
        difference: the difference with the interval of this look; None if no seed has one.
        look: the number of seeds that was looked at.
        next_look: the number of seeds that may decide; None if decided, or if there are no more looks.
    """

    verdict: Verdict
    difference: Interval | None
    look: int
    next_look: int | None = None


def decide(
    sample: Callable[[int], Sequence[float] | None],
    looks: LookSchedule,
    low: float = 0.0,
    high: float = math.inf,
    comparisons_to_hold: int = 1,
    comparisons_to_fail: int = 1,
) -> Decision:
    """Return whether a mean difference lies between bounds, at the first look that decides.

    The result depends only on the seeds up to that look, even if there are more.

    Args:
        sample: returns a difference for each of the first n seeds; None if those seeds were not all trained yet.
        looks: the numbers of seeds.
        low: the lower bound.
        high: the upper bound.
        comparisons_to_hold: how many comparisons there are of which a single one suffices for the claim to hold.
        comparisons_to_fail: how many there are of which a single one suffices for the claim not to hold.

    Example:
        >>> differences, looks = [2.0, 3.0, -1.0, 2.0, 1.0, 2.0, 3.0, 2.0, 1.0, 2.0], LookSchedule((5, 10))
        >>> decision = decide(lambda seeds: differences[:5] if seeds == 5 else None, looks)
        >>> decision.verdict, decision.next_look
        ('not decided', 10)
        >>> decide(lambda seeds: differences[:seeds], looks).verdict
        'holds'
    """
    decision = Decision("not decided", None, looks.seeds[0])
    for seeds in looks.seeds:
        values = sample(seeds)
        if values is None:
            return replace(decision, next_look=seeds)
        if not values:
            return decision
        shown, to_hold, to_fail = (
            confidence_interval(values, looks.confidence(count))
            for count in (1, comparisons_to_hold, comparisons_to_fail)
        )
        decision = Decision(_verdict(to_hold, to_fail, low, high), shown, seeds)
        if decision.verdict != "not decided" or len(values) < 2:
            return decision
    return decision


def _verdict(to_hold: Interval, to_fail: Interval, low: float, high: float) -> Verdict:
    """Compare intervals of the same mean with bounds; with one seed they are NaN, and nothing is decided."""
    if low < to_hold.low and to_hold.high < high:
        return "holds"
    return "does not hold" if to_fail.high < low or to_fail.low > high else "not decided"
