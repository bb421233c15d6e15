"""EWC's penalty as a proximal step, which does not extrapolate at any strength, and pulls with a budget in nats."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mooring
from mooring_lab.methods.method import Method, decades
from mooring_lab.methods.strengths import DIGITS_STRENGTHS

if TYPE_CHECKING:
    from mooring.rules import EWC
    from mooring.rules.kronecker import Kronecker


def mean_fisher(seed: int) -> EWC:
    """Return the Fisher diagonal as a mean over a task; it is the same for every seed.

    Example:
        >>> mean_fisher(seed=0).per_sample
        True
    """
    return mooring.EWC(decay=None, per_sample=True)


def layer_curvature(seed: int) -> Kronecker:
    """Return the curvature of whole layers, observed in every fourth step; it is the same for every seed.

    Example:
        >>> layer_curvature(seed=0).every
        4
    """
    return mooring.Kronecker(every=4)


METHODS = [
    Method(
        "proximal-ewc",
        "EWC's penalty as a proximal step, with the sum of the tasks' mean Fisher information",
        mean_fisher,
        lambda strength: mooring.Proximal(strength),
        DIGITS_STRENGTHS["proximal-ewc"],
        merge="sum",
        dial=decades(0, 7),
    ),
    Method(
        "budget-ewc",
        "smallest pull that keeps the estimated rise of the old loss within a budget in nats (its strength)",
        mean_fisher,
        lambda nats: mooring.Budget(nats),
        DIGITS_STRENGTHS["budget-ewc"],
        merge="sum",
        dial=decades(-7, 0),
    ),
    Method(
        "budget-kronecker",
        "a budget in nats (its strength), with the curvature of whole layers instead of single weights",
        layer_curvature,
        lambda nats: mooring.Budget(nats),
        DIGITS_STRENGTHS["budget-kronecker"],
        merge="sum",
        dial=decades(-7, 0),
    ),
]
