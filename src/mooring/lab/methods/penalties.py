"""Quadratic regularizers: a penalty on leaving the anchor, with each importance, balanced, clamped, and SI's signs.

Default strengths are in `mooring.lab.methods.strengths`.
"""

from collections.abc import Callable
from functools import partial

from mooring.importance import EWC, MAS, SI, Balanced, Importance, Random, RWalk, Uniform
from mooring.lab.methods.method import Method, decades
from mooring.lab.methods.strengths import DIGITS_STRENGTHS as STRENGTHS
from mooring.pulls import Penalty
from mooring.pulls.run_axis import Number

__all__ = ["DIALS", "IMPORTANCES", "METHODS", "VARIANTS"]

IMPORTANCES: dict[str, tuple[Callable[[int], Importance], str]] = {
    "ewc": (lambda seed: EWC(), "the squared gradient"),
    "mas": (lambda seed: MAS(), "the sensitivity of the outputs"),
    "si": (lambda seed: SI(), "the contribution to the fall of the loss"),
    "rwalk": (lambda seed: RWalk(), "Fisher and path together"),
    "uniform": (lambda seed: Uniform(), "1 everywhere (the paper's Vanilla)"),
    "random": (lambda seed: Random(seed=seed), "a random number"),
}
"""Each importance from a run's seed, and what it is in a few words."""

DIALS = {
    "ewc": decades(0, 7),
    "mas": decades(-4, 3),
    "si": decades(-3, 4),
    "rwalk": decades(-3, 4),
    "uniform": decades(-3, 4),
    "random": decades(-3, 4),
}
"""The strengths that a sweep goes through: eight decades, wherever scores of that kind put them."""

SIGNS: dict[str, tuple[str | float, str]] = {
    "si-absolute": ("absolute", "scores without their sign"),
    "si-signed": ("signed", "scores with their sign: where some are negative, they push away"),
    "si-negative": (0.001, "absolute scores but for one in a thousand that keeps its sign"),
}


def clamped(strength: Number) -> Penalty:
    """A penalty that caps importance where it would extrapolate.

    Example:
        >>> clamped(10.0)
        Penalty(strength=10.0, clamp=True)
    """
    return Penalty(strength, clamp=True)


def _balanced(make: Callable[[int], Importance], seed: int) -> Importance:
    return Balanced(make(seed))


def _signed(sign: str | float, seed: int) -> Importance:
    return SI(sign=sign, seed=seed)  # type: ignore[arg-type]


def _family() -> list[Method]:
    methods = []
    for name, (make, what) in IMPORTANCES.items():
        methods.append(Method(name, f"penalty weighted by {what}", make, Penalty, STRENGTHS[name], dial=DIALS[name]))
    for name, (sign, what) in SIGNS.items():
        line, importance = f"SI's penalty, {what}", partial(_signed, sign)
        methods.append(Method(name, line, importance, Penalty, STRENGTHS["si"], dial=DIALS["si"]))
    for name, (make, what) in IMPORTANCES.items():
        line = f"penalty weighted by {what}, every layer with the same mean"
        importance = partial(_balanced, make)
        methods.append(Method(f"balanced-{name}", line, importance, Penalty, STRENGTHS[name], dial=DIALS[name]))
    for name, (make, what) in IMPORTANCES.items():
        line = f"penalty weighted by {what}, capped where it would extrapolate"
        methods.append(Method(f"clamped-{name}", line, make, clamped, STRENGTHS[name], dial=DIALS[name]))
    return methods


METHODS = _family()

VARIANTS = [
    Method(
        "si-flipped",
        "SI's penalty, absolute scores but for one in a thousand that is negative",
        partial(_signed, "flipped"),
        Penalty,
        STRENGTHS["si"],
        dial=DIALS["si"],
    )
]
