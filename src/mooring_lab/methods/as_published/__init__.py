"""Methods as the paper's public code defines them, where it differs from the equations.

The code is https://github.com/EkdeepSLubana/QRforgetting, commit 317fd2d (MIT). What differs: the penalty has no 1/2,
and scores read the gradient with the penalty's; SI and RWalk have a path of their own (`mooring.SI`); MAS adds the
gradient of a second pass to the task's; the explicit step returns weights that never mattered. Replay as published is
with the other forms of replay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import mooring
from mooring_lab.methods.importance_table import IMPORTANCES as IMPORTANCE_TABLE
from mooring_lab.methods.strengths import DIGITS_STRENGTHS
from mooring_lab.model.known_methods import METHODS as TEXTBOOK
from mooring_lab.model.method import Method, PluginOptions, ReplayOptions

if TYPE_CHECKING:
    from mooring.rules import Importance, Interpolation, Penalty
    from mooring.rules.pull import Number

DAMPING = 1e-10
REPLAY = ("er", "a-gem")


@dataclass(frozen=True)
class SecondPassOptions(PluginOptions):
    """Importances of a second pass after the optimizer's step."""

    plugin: str = "mooring_lab.methods.as_published.second_pass:SecondPass"
    uses_strength = False
    scores_late = True


def _added_mas(seed: int) -> Importance:
    from mooring_lab.methods.as_published.second_pass import AddedMAS  # needs torch

    return AddedMAS()


IMPORTANCES: dict[str, Callable[[int], Importance]] = {
    "ewc": lambda seed: mooring.EWC(),
    "mas": _added_mas,
    "si": lambda seed: mooring.SI(path="rising", damping=DAMPING),
    "rwalk": lambda seed: mooring.RWalk(path="rising", damping=DAMPING),
}


def doubled_penalty(strength: Number) -> Penalty:
    """Return the penalty strength * importance * d^2, without the usual 1/2.

    Example:
        >>> doubled_penalty(10.0)
        Penalty(strength=20.0, clamp=False)
    """
    return mooring.Penalty(2 * strength)


def returning_step(strength: Number) -> Interpolation:
    """Return the explicit step that returns weights which never mattered.

    Example:
        >>> returning_step(0.0).returns
        True
    """
    return mooring.Interpolation(returns=True)


def _damped(rule: str, seed: int) -> Importance:
    return mooring.SI(damping=DAMPING) if rule == "si" else mooring.RWalk(damping=DAMPING)


def _plugin(name: str) -> PluginOptions | None:
    return SecondPassOptions() if name == "mas" else None


VARIANTS = [
    *(
        Method(
            f"{name}-as-published",
            f"{name}'s penalty as the paper's public code defines it",
            make,
            doubled_penalty,
            DIGITS_STRENGTHS[name],
            plugin=_plugin(name),
            penalized_scores=True,
        )
        for name, make in IMPORTANCES.items()
    ),
    *(
        Method(
            f"explicit-{name}-as-published",
            f"the explicit step with {name} as the paper's public code defines it",
            make,
            returning_step,
            plugin=_plugin(name),
        )
        for name, make in IMPORTANCES.items()
    ),
    *(
        replace(TEXTBOOK[f"{form}{name}"], name=f"{form}{name}-damping-1e-10", importance=partial(_damped, name))
        for name in ("si", "rwalk")
        for form in ("", "explicit-")
        if f"{form}{name}" in TEXTBOOK
    ),
    *(
        replace(TEXTBOOK[name], name=f"{name}-unrestored", plugin=replace(plugin, restores_biases=False))
        for name in REPLAY
        if name in TEXTBOOK and isinstance(plugin := TEXTBOOK[name].plugin, ReplayOptions)
    ),
    *(
        replace(method, name=f"{name}-decays-first", first_decay=1e-4)
        for name, method in TEXTBOOK.items()
        if name.removeprefix("explicit-") in (*IMPORTANCE_TABLE, *REPLAY)
    ),
]
