"""Quadratic penalties on the distance to the anchor: every importance, also balanced or clamped, and SI's signs.

The summed ones keep what the proximal step keeps, and differ from it in the pull alone; L2-SP keeps nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import mooring
from mooring_lab.methods.importance_table import IMPORTANCES, group_by_importance, mean_fisher
from mooring_lab.methods.strengths import DIGITS_STRENGTHS
from mooring_lab.model.method import Method, decades

if TYPE_CHECKING:
    from mooring.rules import Importance, Penalty, Pull
    from mooring.rules.pull import Number

DIALS = dict.fromkeys(IMPORTANCES, decades(-3, 4)) | {"ewc": decades(0, 7), "mas": decades(-4, 3)}
"""The strengths that a sweep tries: eight decades, chosen for the scale of each importance."""

SUMMED_STRENGTHS = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1e3, 3e3, 1e4)

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
    group = group_by_importance(base, "published" if name == base != "ewc" else "variants")
    return Method(name, line, importance, pull, DIGITS_STRENGTHS[base], dial=DIALS[base], group=group)


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
        "l2-sp",
        "penalty on the distance to the weights that training started from (L2-SP)",
        lambda seed: mooring.Uniform(),
        penalty,
        DIGITS_STRENGTHS["l2-sp"],
        anchors="start",
        dial=DIALS["uniform"],
        group="published",
    ),
]

FLIPPED = "SI's penalty, with absolute scores, except one in a thousand that is negative"
VARIANTS = [_penalty("si-flipped", FLIPPED, partial(_signed, "flipped"), "si")]
