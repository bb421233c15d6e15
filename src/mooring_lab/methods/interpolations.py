"""Interpolation towards the anchor: the paper's explicit step, model merging and model soups; and L2-SP.

Each method is an importance and a pull of `mooring`; its strength, if any, is a stiffness, a share or a weight.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import mooring
from mooring_lab.methods.method import Method
from mooring_lab.methods.penalties import DIALS, IMPORTANCES, penalty
from mooring_lab.methods.proximal_steps import mean_fisher
from mooring_lab.methods.strengths import DIGITS_STRENGTHS

if TYPE_CHECKING:
    from mooring.rules import Importance, Interpolation
    from mooring.rules.pull import Number

SHARES = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
STIFFNESSES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
WEIGHTS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
ROOTS = {"cube": (3, "cube roots"), "ratio": (1, "plain values")}

SOUP_INTERVAL = 50
"""The number of iterations between two blends of a running soup."""


def _task_count(seed: int) -> Importance:
    from mooring_lab.methods.task_count import TaskCount

    return TaskCount()


def _explicit(root: float, strength: Number) -> Interpolation:
    return mooring.Interpolation(root=root)


def _merge(weight: Number) -> Interpolation:
    """Return a merge at the end of a task, by the ratio of the two models' importances."""
    return mooring.Interpolation(root=1, every="task", weight=weight)


METHODS = [
    *(
        Method(
            f"explicit-{name}",
            f"interpolate by the ratio of old to new importance, which is {description}",
            make,
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
    Method(
        "l2-sp",
        "penalty on the distance to the weights that training started from (L2-SP)",
        lambda seed: mooring.Uniform(),
        penalty,
        DIGITS_STRENGTHS["l2-sp"],
        anchors="start",
        dial=DIALS["uniform"],
    ),
    Method(
        "sfa",
        f"move a share (its strength) of the distance back in every {SOUP_INTERVAL}th step (SFA, a running soup)",
        lambda seed: mooring.Uniform(),
        lambda share: mooring.rules.Blend(share, every=SOUP_INTERVAL),
        DIGITS_STRENGTHS["sfa"],
        dial=SHARES,
    ),
    Method(
        "wise-ft",
        "move a share (its strength) of the distance back at the end of each task (WiSE-FT)",
        lambda seed: mooring.Uniform(),
        lambda share: mooring.rules.Blend(share),
        DIGITS_STRENGTHS["wise-ft"],
        dial=SHARES,
    ),
    Method(
        "imm-mean",
        "average the weights over the tasks so far, at the end of each task (mean-IMM)",
        _task_count,
        lambda strength: _merge(1.0),
        merge="sum",
    ),
    Method(
        "imm-mode",
        "average the weights over the tasks so far, by Fisher information (mode-IMM, Fisher merging)",
        mean_fisher,
        lambda strength: _merge(1.0),
        merge="sum",
    ),
    Method(
        "cofima",
        "Fisher merging with a factor (its strength) on the previous importance (CoFiMA)",
        mean_fisher,
        _merge,
        DIGITS_STRENGTHS["cofima"],
        merge="sum",
        dial=WEIGHTS,
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
