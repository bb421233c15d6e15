"""Means, intervals and tests over seeds, from the textbook."""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from scipy.stats import t, ttest_ind_from_stats

Number = Fraction | float


class SeedInterval(NamedTuple):
    """Mean over seeds, standard deviation (n - 1) and 95 % interval of the mean; NaN where one seed has none."""

    mean: float
    std: float
    low: float
    high: float
    seeds: int

    @property
    def numbers(self) -> list[float]:
        """The numbers that a difference is printed with."""
        return [self.mean] if self.seeds < 2 else [self.mean, self.low, self.high]


def interval(values: Sequence[Number], level: float = 0.95) -> SeedInterval | None:
    """Return the interval of values, one for each seed; None without values. Fractions are summed without rounding."""
    count = len(values)
    if not count:
        return None
    mean = sum(values) / count
    if count == 1:
        return SeedInterval(float(mean), math.nan, math.nan, math.nan, 1)
    std = math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1))
    half = float(t.ppf((1 + level) / 2, count - 1)) * std / math.sqrt(count)
    return SeedInterval(float(mean), std, float(mean) - half, float(mean) + half, count)


def verdict_on_range(value: SeedInterval | None, low: float = 0.0, high: float = math.inf) -> str:
    """Return whether an interval lies between bounds, outside of them, or neither."""
    if value is None or value.seeds < 2:
        return "not decided"
    if value.low > low and value.high < high:
        return "holds"
    return "does not hold" if value.high < low or value.low > high else "not decided"


def verdict_on_share(count: int, total: int, share: float = 1.0) -> str:
    """Return whether a count is at least a share of the total."""
    if not total:
        return "not decided"
    return "holds" if count >= share * total else "does not hold"


def welch_agrees(ours: SeedInterval | None, mean: float | None, std: float | None, count: int = 5) -> bool | None:
    """Return whether Welch's t-test finds no difference at 5 %; None if a mean or a standard deviation is missing."""
    if ours is None or mean is None or std is None or math.isnan(ours.std):
        return None
    if not ours.std and not std:
        return ours.mean == mean
    test = ttest_ind_from_stats(ours.mean, ours.std, ours.seeds, mean, std, count, equal_var=False)
    return bool(test.pvalue >= 0.05)
