"""EWC's penalty as a proximal step, which does not extrapolate at any strength."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mooring
from mooring.lab.methods.method import Method, decades
from mooring.lab.methods.strengths import DIGITS_STRENGTHS

if TYPE_CHECKING:
    from mooring.importance import EWC

__all__ = ["METHODS", "mean_fisher"]


def mean_fisher(seed: int) -> EWC:
    """Return the Fisher diagonal as a mean over a task; it is the same for every seed.

    Example:
        >>> mean_fisher(seed=0).per_sample
        True
    """
    return mooring.EWC(decay=None, per_sample=True)


METHODS = [
    Method(
        "proximal-ewc",
        "EWC's penalty as a proximal step, with the sum of the tasks' mean Fisher information",
        mean_fisher,
        lambda strength: mooring.Proximal(strength),
        strength=DIGITS_STRENGTHS["proximal-ewc"],
        merge="sum",
        dial=decades(0, 7),
    )
]
