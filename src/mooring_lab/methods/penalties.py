"""Quadratic penalties on the distance to the anchor: every importance, also balanced or clamped, and SI's signs.

The `MATCHED` ones keep what the proximal step and the budgets keep, and differ from these in the pull alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import mooring
from mooring_lab.methods.method import Method, decades
from mooring_lab.methods.proximal_steps import layer_curvature, mean_fisher
from mooring_lab.methods.strengths import DIGITS_STRENGTHS

if TYPE_CHECKING:
    from mooring.rules import Importance, Penalty, Pull
    from mooring.rules.pull import Number

IMPORTANCES: dict[str, tuple[Callable[[int], Importance], str]] = {
    "ewc": (lambda seed: mooring.EWC(), "the squared gradient"),
    "mas": (lambda seed: mooring.MAS(), "the sensitivity of the outputs"),
    "si": (lambda seed: mooring.SI(), "the contribution to lowering the loss"),
    "rwalk": (lambda seed: mooring.RWalk(), "Fisher information plus path integral"),
    "uniform": (lambda seed: mooring.Uniform(), "1 everywhere (the paper's Vanilla)"),
    "random": (lambda seed: mooring.Random(seed=seed), "a random number"),
}
"""For every importance, a function that makes it from a run's seed, and a short description."""

DIALS = dict.fromkeys(IMPORTANCES, decades(-3, 4)) | {"ewc": decades(0, 7), "mas": decades(-4, 3)}
"""The strengths that a sweep tries: eight decades, chosen for the scale of each importance."""

SIGNS: dict[str, tuple[str | float, str]] = {
    "si-absolute": ("absolute", "with absolute scores"),
    "si-signed": ("signed", "with signed scores: negative ones push away from the anchor"),
    "si-negative": (0.001, "with absolute scores, except one in a thousand that keeps its sign"),
}


def penalty(strength: Number, *, clamp: bool = False) -> Penalty:
    """Return a penalty with that strength; a clamped one caps the importance where it would extrapolate.

    Example:
        >>> penalty(10.0, clamp=True)
        Penalty(strength=10.0, clamp=True)
    """
    return mooring.Penalty(strength, clamp=clamp)


def _balanced(make: Callable[[int], Importance], seed: int) -> Importance:
    return mooring.Balanced(make(seed))


def _signed(sign: str | float, seed: int) -> Importance:
    return mooring.SI(sign=sign, seed=seed)  # type: ignore[arg-type]


def _penalty(
    name: str, line: str, importance: Callable[[int], Importance], base: str, pull: Callable[[Number], Pull] = penalty
) -> Method:
    """Return a penalty with the default strength and the sweep of the importance called `base`."""
    return Method(name, line, importance, pull, DIGITS_STRENGTHS[base], dial=DIALS[base])


METHODS = [
    *(_penalty(name, f"penalty weighted by {line}", make, name) for name, (make, line) in IMPORTANCES.items()),
    *(_penalty(name, f"SI's penalty, {line}", partial(_signed, sign), "si") for name, (sign, line) in SIGNS.items()),
    *(
        _penalty(
            f"balanced-{name}",
            f"penalty weighted by {line}, every layer with the same mean",
            partial(_balanced, make),
            name,
        )
        for name, (make, line) in IMPORTANCES.items()
    ),
    *(
        _penalty(
            f"clamped-{name}",
            f"penalty weighted by {line}, capped where it would extrapolate",
            make,
            name,
            partial(penalty, clamp=True),
        )
        for name, (make, line) in IMPORTANCES.items()
    ),
]

SUMMED_STRENGTHS = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1e3, 3e3, 1e4)
LAPLACE_STRENGTHS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1e3)

MATCHED = [
    Method(
        "summed-ewc",
        "EWC's penalty with the importance of proximal-ewc: the sum of the tasks' mean Fisher information",
        mean_fisher,
        penalty,
        DIGITS_STRENGTHS["summed-ewc"],
        merge="sum",
        dial=SUMMED_STRENGTHS,
    ),
    Method(
        "clamped-summed-ewc",
        "the penalty of summed-ewc, capped where it would extrapolate",
        mean_fisher,
        partial(penalty, clamp=True),
        DIGITS_STRENGTHS["clamped-summed-ewc"],
        merge="sum",
        dial=decades(0, 7),
    ),
    Method(
        "laplace-kronecker",
        "penalty with the curvature of budget-kronecker: online Laplace with Kronecker factors",
        layer_curvature,
        penalty,
        DIGITS_STRENGTHS["laplace-kronecker"],
        merge="sum",
        dial=LAPLACE_STRENGTHS,
    ),
    Method(
        "clamped-laplace-kronecker",
        "the penalty of laplace-kronecker, with eigenvalues capped where it would extrapolate",
        layer_curvature,
        partial(penalty, clamp=True),
        DIGITS_STRENGTHS["clamped-laplace-kronecker"],
        merge="sum",
        dial=decades(0, 7),
    ),
]
"""Penalties that keep the curvature of `proximal_steps`, so that a comparison shows what the pull alone does."""

FLIPPED = "SI's penalty, with absolute scores, except one in a thousand that is negative"
VARIANTS = [_penalty("si-flipped", FLIPPED, partial(_signed, "flipped"), "si")]
