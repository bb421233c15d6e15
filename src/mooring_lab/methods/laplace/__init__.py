"""Online Laplace: a penalty with the curvature of whole layers, as the budgets have it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from mooring_lab.methods.importance_table import layer_curvature
from mooring_lab.methods.strengths import DIGITS_STRENGTHS
from mooring_lab.model.method import Method, decades

if TYPE_CHECKING:
    from mooring.rules import Penalty
    from mooring.rules.pull import Number

LAPLACE_STRENGTHS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1e3)


def _penalty(strength: Number, *, clamp: bool = False) -> Penalty:
    from mooring_lab.methods.laplace.layer_penalty import LayerPenalty

    return LayerPenalty(strength, clamp=clamp)


METHODS = [
    Method(
        "laplace-kronecker",
        "penalty with the curvature of budget-kronecker: online Laplace with Kronecker factors",
        layer_curvature,
        _penalty,
        DIGITS_STRENGTHS["laplace-kronecker"],
        merge="sum",
        dial=LAPLACE_STRENGTHS,
        group="published",
    ),
    Method(
        "clamped-laplace-kronecker",
        "the penalty of laplace-kronecker, with eigenvalues capped where it would extrapolate",
        layer_curvature,
        partial(_penalty, clamp=True),
        DIGITS_STRENGTHS["clamped-laplace-kronecker"],
        merge="sum",
        dial=decades(0, 7),
    ),
]
