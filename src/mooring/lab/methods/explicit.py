"""The paper's explicit step: interpolate towards the anchor after each step, with nothing to tune."""

from mooring.lab.methods.method import Method
from mooring.lab.methods.penalties import IMPORTANCES

__all__ = ["METHODS"]

METHODS = [
    Method(f"explicit-{name}", f"interpolate by the ratio of past to present importance: {what}", make)
    for name, (make, what) in IMPORTANCES.items()
]
