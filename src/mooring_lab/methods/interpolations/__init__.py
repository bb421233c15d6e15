"""The paper's explicit step: interpolation towards the anchor after every step, by the ratio of importances."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import mooring
from mooring_lab.methods.importance_table import IMPORTANCES, group_by_importance
from mooring_lab.methods.strengths import DIGITS_STRENGTHS
from mooring_lab.model.method import Method

if TYPE_CHECKING:
    from mooring.rules import Interpolation
    from mooring.rules.pull import Number

STIFFNESSES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
ROOTS = {"cube": (3, "cube roots"), "ratio": (1, "plain values")}


def _explicit(root: float, strength: Number) -> Interpolation:
    return mooring.Interpolation(root=root)


METHODS = [
    *(
        Method(
            f"explicit-{name}",
            f"interpolate by the ratio of old to new importance, which is {description}",
            make,
            group=group_by_importance(name, "variants" if name == "ewc" else "published"),
        )
        for name, (make, description) in IMPORTANCES.items()
    ),
    *(
        Method(
            f"soft-{name}",
            f"the step of explicit-{name}, times a stiffness (its strength)",
            make,
            lambda stiffness: mooring.Interpolation(stiffness=stiffness),
            DIGITS_STRENGTHS["soft"],
            dial=STIFFNESSES,
        )
        for name, (make, _) in IMPORTANCES.items()
        if name not in ("uniform", "random")
    ),
]

VARIANTS = [
    Method(
        f"explicit-{name}-{form}",
        f"interpolate by the ratio of {values}: {description}",
        make,
        partial(_explicit, root),
    )
    for name, (make, description) in IMPORTANCES.items()
    for form, (root, values) in ROOTS.items()
]
"""The explicit step with another root than the square root."""
