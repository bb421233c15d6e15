"""Merging of weights with the anchor, during a task or at its end: model soups and averages over tasks.

Each method is an importance and a pull of `mooring`; its strength, if any, is a share or a weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mooring
from mooring_lab.methods.importance_table import mean_fisher
from mooring_lab.methods.strengths import DIGITS_STRENGTHS
from mooring_lab.model.method import Method

if TYPE_CHECKING:
    from mooring.rules import Importance, Interpolation
    from mooring.rules.pull import Number

SHARES = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
WEIGHTS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)

SOUP_INTERVAL = 50
"""The number of iterations between two blends of a running soup."""


def _task_count(seed: int) -> Importance:
    from mooring_lab.methods.merging.task_count import TaskCount

    return TaskCount()


def _merge(weight: Number) -> Interpolation:
    """Return a merge at the end of a task, by the ratio of the two models' importances."""
    return mooring.Interpolation(root=1, every="task", weight=weight)


METHODS = [
    Method(
        "sfa",
        f"move a share (its strength) of the distance back in every {SOUP_INTERVAL}th step (SFA, a running soup)",
        lambda seed: mooring.Uniform(),
        lambda share: mooring.rules.Blend(share, every=SOUP_INTERVAL),
        DIGITS_STRENGTHS["sfa"],
        dial=SHARES,
        group="published",
    ),
    Method(
        "wise-ft",
        "move a share (its strength) of the distance back at the end of each task (WiSE-FT)",
        lambda seed: mooring.Uniform(),
        lambda share: mooring.rules.Blend(share),
        DIGITS_STRENGTHS["wise-ft"],
        dial=SHARES,
        group="published",
    ),
    Method(
        "imm-mean",
        "average the weights over the tasks so far, at the end of each task (mean-IMM)",
        _task_count,
        lambda strength: _merge(1.0),
        merge="sum",
        group="published",
    ),
    Method(
        "imm-mode",
        "average the weights over the tasks so far, by Fisher information (mode-IMM, Fisher merging)",
        mean_fisher,
        lambda strength: _merge(1.0),
        merge="sum",
        group="published",
    ),
    Method(
        "cofima",
        "Fisher merging with a factor (its strength) on the previous importance (CoFiMA)",
        mean_fisher,
        _merge,
        DIGITS_STRENGTHS["cofima"],
        merge="sum",
        dial=WEIGHTS,
        group="published",
    ),
]
