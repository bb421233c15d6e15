"""Explicit steps with a stiffness, model merging, model soups, and L2-SP.

Each method is an importance and a pull of `mooring`; its strength is a stiffness, a share or a weight.
"""

from typing import ClassVar

from mooring.importance import Uniform
from mooring.lab.methods.method import Method
from mooring.lab.methods.penalties import DIALS, IMPORTANCES
from mooring.lab.methods.proximal_steps import mean_fisher
from mooring.lab.methods.strengths import DIGITS_STRENGTHS
from mooring.pulls import Blend, Interpolation, Penalty
from mooring.pulls.merges import total
from mooring.pulls.run_axis import Number

__all__ = ["METHODS", "TaskCount"]

SHARES = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
STIFFNESSES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
WEIGHTS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)

SOUP_INTERVAL = 50
"""The number of iterations between two blends of a running soup."""


class TaskCount(Uniform):
    """An importance of 1 per task; summed, it is the number of tasks that have trained a parameter.

    Example:
        >>> TaskCount().merges
        True
    """

    merges: ClassVar[bool] = True


def _soft(stiffness: Number) -> Interpolation:
    return Interpolation(stiffness=stiffness)


def _merge(weight: Number) -> Interpolation:
    """Return a merge at the end of a task, by the ratio of the two models' importances."""
    return Interpolation(root=1, every="task", weight=weight)


def _merge_equally(strength: Number) -> Interpolation:
    return _merge(1.0)


def _soup(share: Number) -> Blend:
    return Blend(share, every=SOUP_INTERVAL)


METHODS = [
    *(
        Method(
            f"soft-{name}",
            f"the explicit step with a stiffness (its strength): {description}",
            make,
            _soft,
            strength=DIGITS_STRENGTHS["soft"],
            dial=STIFFNESSES,
        )
        for name, (make, description) in IMPORTANCES.items()
        if name not in ("uniform", "random")
    ),
    Method(
        "l2-sp",
        "penalty on the distance to the weights that training started from (L2-SP)",
        lambda seed: Uniform(),
        Penalty,
        strength=DIGITS_STRENGTHS["l2-sp"],
        anchors="start",
        dial=DIALS["uniform"],
    ),
    Method(
        "sfa",
        f"move a share (its strength) of the distance back in every {SOUP_INTERVAL}th step (SFA, a running soup)",
        lambda seed: Uniform(),
        _soup,
        strength=DIGITS_STRENGTHS["sfa"],
        dial=SHARES,
    ),
    Method(
        "wise-ft",
        "move a share (its strength) of the distance back at the end of each task (WiSE-FT)",
        lambda seed: Uniform(),
        Blend,
        strength=DIGITS_STRENGTHS["wise-ft"],
        dial=SHARES,
    ),
    Method(
        "imm-mean",
        "average the weights over the tasks so far, at the end of each task (mean-IMM)",
        lambda seed: TaskCount(),
        _merge_equally,
        merge=total,
    ),
    Method(
        "imm-mode",
        "average the weights over the tasks so far, by Fisher information (mode-IMM, Fisher merging)",
        mean_fisher,
        _merge_equally,
        merge=total,
    ),
    Method(
        "cofima",
        "Fisher merging with a factor (its strength) on the previous importance (CoFiMA)",
        mean_fisher,
        _merge,
        strength=DIGITS_STRENGTHS["cofima"],
        merge=total,
        dial=WEIGHTS,
    ),
]
