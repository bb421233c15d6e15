"""The importances that families of methods share, each as a function that makes it from a run's seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import mooring

if TYPE_CHECKING:
    from mooring.rules import EWC, Importance
    from mooring.rules.kronecker import Kronecker

IMPORTANCES: dict[str, tuple[Callable[[int], Importance], str]] = {
    "ewc": (lambda seed: mooring.EWC(), "the squared gradient"),
    "mas": (lambda seed: mooring.MAS(), "the sensitivity of the outputs"),
    "si": (lambda seed: mooring.SI(), "the contribution to lowering the loss"),
    "rwalk": (lambda seed: mooring.RWalk(), "Fisher information plus path integral"),
    "uniform": (lambda seed: mooring.Uniform(), "1 everywhere (the paper's Vanilla)"),
    "random": (lambda seed: mooring.Random(seed=seed), "a random number"),
}
"""For every importance, a function that makes it from a run's seed, and a short description."""


def group_by_importance(
    name: str, other: Literal["published", "variants"]
) -> Literal["controls", "published", "variants"]:
    """Return the group of a method with this importance: one that knows nothing makes it a control.

    Example:
        >>> group_by_importance("random", "published"), group_by_importance("mas", "published")
        ('controls', 'published')
    """
    return "controls" if name in ("uniform", "random") else other


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
