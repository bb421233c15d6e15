"""The controller of a measured budget: how much the estimate may spend so that the measured value meets the budget."""

import math
from typing import Any

MAX_FALL, MAX_RISE = 8.0, 2.0
"""The largest factors by which one measurement lowers and raises what may be spent."""

RESERVE = 1.2
"""While a budget is distilled, its pull acts only above this multiple: it gives up more of what is learned."""

UNUSED_PULL = 1e3
"""The first scale then: so much may be spent that nothing is pulled before a measurement asks for it."""


def pull_limit(named: Any, *, distils: bool) -> Any:
    """Return the measured value from which the pull acts during a task, for a number or a tensor of budgets.

    Example:
        >>> pull_limit(0.5, distils=False), pull_limit(0.5, distils=True)
        (0.5, 0.6)
    """
    return RESERVE * named if distils else named


def first_scale(*, distils: bool) -> float:
    """Return the factor of what may be spent, at the start of the first task that is measured.

    Example:
        >>> first_scale(distils=False)
        1.0
    """
    return UNUSED_PULL if distils else 1.0


def next_scale(scale: float, measured: float, named: float, *, gain: float, binding: bool) -> float:
    """Return the next factor between the estimate that may be spent and the budget that was named.

    scale <- scale * (named / measured)^gain. Near the anchor the divergence grows in proportion to the estimate, so
    a gain of 1 would be exact if the parameters followed at once, and a smaller one is stable. It is raised only
    while the budget's pull acts: otherwise training has not used what it already may.

    Args:
        scale: the present factor.
        measured: what was measured; infinite or NaN if the outputs are not finite.
        named: the budget.
        gain: between 0 and 1.
        binding: whether the pull acts.

    Example:
        >>> next_scale(1.0, 0.4, 0.1, gain=0.5, binding=True), next_scale(1.0, 0.05, 0.1, gain=0.5, binding=False)
        (0.5, 1.0)
    """
    if not math.isfinite(measured):
        return scale / MAX_FALL
    if not named:
        return scale
    change = (named / max(measured, named * 1e-6)) ** gain
    change = min(max(change, 1 / MAX_FALL), MAX_RISE)
    return scale * change if change < 1 or binding else scale
