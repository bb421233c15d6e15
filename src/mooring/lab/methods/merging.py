"""The explicit step with a dial, and what is known by other names: merging, soups, and a penalty towards the start.

All are made of an importance and a pull of the core; their strength is whatever number they leave open.
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

SOUP = 50
"""Iterations between two blends of a running soup."""


class TaskCount(Uniform):
    """1 for each task, summed: a parameter is worth as much as tasks have trained it.

    Example:
        >>> TaskCount().merges
        True
    """

    merges: ClassVar[bool] = True


def _soft(stiffness: Number) -> Interpolation:
    return Interpolation(stiffness=stiffness)


def _merged(weight: Number) -> Interpolation:
    """Once at the end of a task, by the plain ratio of what both models are worth."""
    return Interpolation(root=1, every="task", weight=weight)


def _merged_alike(strength: Number) -> Interpolation:
    return _merged(1.0)


def _soup(share: Number) -> Blend:
    return Blend(share, every=SOUP)


METHODS = [
    *(
        Method(
            f"soft-{name}",
            f"the explicit step at a stiffness (its strength) below 1: {what}",
            make,
            _soft,
            strength=DIGITS_STRENGTHS["soft"],
            dial=STIFFNESSES,
        )
        for name, (make, what) in IMPORTANCES.items()
        if name not in ("uniform", "random")
    ),
    Method(
        "l2-sp",
        "penalty on leaving the weights that training started from (L2-SP)",
        lambda seed: Uniform(),
        Penalty,
        strength=DIGITS_STRENGTHS["l2-sp"],
        anchors="start",
        dial=DIALS["uniform"],
    ),
    Method(
        "sfa",
        f"a share (its strength) of the way back in every {SOUP}th step (SFA, a running soup)",
        lambda seed: Uniform(),
        _soup,
        strength=DIGITS_STRENGTHS["sfa"],
        dial=SHARES,
    ),
    Method(
        "wise-ft",
        "a share (its strength) of the way back once, at the end of each task (WiSE-FT)",
        lambda seed: Uniform(),
        Blend,
        strength=DIGITS_STRENGTHS["wise-ft"],
        dial=SHARES,
    ),
    Method(
        "imm-mean",
        "the mean of the weights after all tasks, taken at the end of each (mean-IMM)",
        lambda seed: TaskCount(),
        _merged_alike,
        merge=total,
    ),
    Method(
        "imm-mode",
        "the mean of the weights, each weighted by its Fisher information (mode-IMM, Fisher merging)",
        mean_fisher,
        _merged_alike,
        merge=total,
    ),
    Method(
        "cofima",
        "the same with the past weighted by a factor (its strength), as in CoFiMA",
        mean_fisher,
        _merged,
        strength=DIGITS_STRENGTHS["cofima"],
        merge=total,
        dial=WEIGHTS,
    ),
]
