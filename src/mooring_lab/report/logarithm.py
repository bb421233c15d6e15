"""Logarithmic axes; matplotlib's own are the slowest part of a figure with many panels."""

import math

import numpy as np

from mooring_lab.report.numbers import general, given
from mooring_lab.report.section import Array


def logarithm(values: Array) -> Array:
    """Return log10 of the values, NaN for values that are not positive or not finite.

    Example:
        >>> logarithm(np.array([100.0, 0.0, -1.0])).tolist()
        [2.0, nan, nan]
    """
    positive = np.isfinite(values) & (values > 0)
    return np.where(positive, np.log10(np.where(positive, values, 1.0)), np.nan)


def ticks(low: float, high: float, max_ticks: int = 6) -> dict[float, str]:
    """Return positions and texts of ticks between two logarithms.

    Example:
        >>> list(ticks(-1.1, 0.4).values()), list(ticks(-9.0, -0.5).values())
        (['0.1', '0.2', '0.5', '1', '2'], ['1e−9', '1e−7', '1e−5', '0.001', '0.1'])
    """
    first, last = math.ceil(low), math.floor(high)
    decades = range(first, last + 1)
    if len(decades) >= 3:
        step = -(-len(decades) // max_ticks)
        return {float(power): given(10.0**power) for power in decades[::step]}
    fine = [digit * 10.0**power for power in range(first - 1, last + 1) for digit in (1, 2, 5)]
    marks = {math.log10(value): given(value) for value in fine if low <= math.log10(value) <= high}
    return marks or {low: general(10**low), high: general(10**high)}
