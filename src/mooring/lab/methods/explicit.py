"""The paper's explicit step: interpolate towards the anchor after each update, without a strength."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import mooring
from mooring.lab.methods.method import Method
from mooring.lab.methods.penalties import IMPORTANCES

if TYPE_CHECKING:
    from mooring.pulls import Interpolation
    from mooring.pulls.run_axis import Number

__all__ = ["METHODS", "VARIANTS"]

METHODS = [
    Method(f"explicit-{name}", f"interpolate by the ratio of previous to present importance: {description}", make)
    for name, (make, description) in IMPORTANCES.items()
]

ROOTS = {"cube": (3, "cube roots"), "ratio": (1, "plain values")}


def _interpolation(root: float, strength: Number) -> Interpolation:
    return mooring.Interpolation(root=root)


VARIANTS = [
    Method(
        f"explicit-{name}-{form}",
        f"interpolate by the ratio of {values}: {description}",
        make,
        partial(_interpolation, root),
    )
    for name, (make, description) in IMPORTANCES.items()
    for form, (root, values) in ROOTS.items()
]
"""The explicit step with another root than the square root."""
