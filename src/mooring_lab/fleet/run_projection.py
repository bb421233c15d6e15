"""The projection of a fleet whose method has one: of gradients before the optimizer's step, or of weights after it."""

from collections.abc import Collection, Sequence

from mooring_lab.fleet.gradient_projection import GradientProjection
from mooring_lab.fleet.stack.stack import Stack
from mooring_lab.fleet.weight_projection import WeightProjection
from mooring_lab.methods import Method
from mooring_lab.methods.projection import InputProjection
from mooring_lab.model.spec import RunSpec

Projection = GradientProjection | WeightProjection


def make_projection(
    method: Method, specs: Sequence[RunSpec], stack: Stack, names: Collection[str]
) -> Projection | None:
    """Return the projection of the runs; None if their method has none.

    Args:
        method: of the runs.
        specs: the runs.
        stack: the runs' networks.
        names: the parameters to protect.
    """
    if method.projection is None:
        return None
    by_inputs = isinstance(method.projection(method.strength or 0.0), InputProjection)
    return (GradientProjection if by_inputs else WeightProjection)(method, specs, stack, names)
