"""The paper's explicit step: interpolate towards the anchor after each step, with nothing to tune."""

from functools import partial

from mooring.lab.methods.method import Method
from mooring.lab.methods.penalties import IMPORTANCES
from mooring.pulls import Interpolation
from mooring.pulls.run_axis import Number

__all__ = ["METHODS", "VARIANTS"]

METHODS = [
    Method(f"explicit-{name}", f"interpolate by the ratio of past to present importance: {what}", make)
    for name, (make, what) in IMPORTANCES.items()
]

ROOTS = {"cube": (3, "cube roots"), "ratio": (1, "plain values")}


def _rooted(root: float, strength: Number) -> Interpolation:
    return Interpolation(root=root)


VARIANTS = [
    Method(f"explicit-{name}-{form}", f"interpolate by the ratio of {of}: {what}", make, partial(_rooted, root))
    for name, (make, what) in IMPORTANCES.items()
    for form, (root, of) in ROOTS.items()
]
"""The same with another root than the square root."""
