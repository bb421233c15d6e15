"""What makes runs alike enough to be stacked."""

from mooring.lab.methods import find_method
from mooring.lab.model.spec import RunSpec

__all__ = ["shape"]


def shape(spec: RunSpec) -> tuple[object, ...]:
    """What two runs must agree in to sail in one fleet; seed, start, strength, heads and SGD's numbers are their own.

    Example:
        >>> one = RunSpec("digits", "0", "ewc", seed=0, strength=1.0)
        >>> shape(one) == shape(RunSpec("digits", "0", "explicit-si", seed=3, lr=0.5, momentum=0.0))
        True
    """
    method = find_method(spec.method)
    steps = (spec.data, spec.network, spec.epochs, spec.batch, spec.memory, spec.flips, spec.shifts)
    seen = (method.data, method.recalls, method.frozen, method.observes_outputs, method.observes_layers)
    return (*steps, spec.dtype, *seen)
