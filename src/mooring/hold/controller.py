"""The controller of a measured budget: how much the estimate may spend so that the measured value meets the budget."""

import math

MAX_FALL, MAX_RISE = 8.0, 2.0
"""The largest factors by which one measurement lowers and raises what may be spent."""

RESERVE = 3.0
"""A pull in reserve acts only above this multiple of the budget, because it gives up more of what is learned."""


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
