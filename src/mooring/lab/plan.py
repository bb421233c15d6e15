"""Which runs sail together."""

from collections.abc import Callable, Sequence

from mooring.lab.fleet.shape import shape
from mooring.lab.spec import RunSpec

__all__ = ["fleets"]


def fleets(specs: Sequence[RunSpec], size: Callable[[RunSpec], int]) -> list[list[RunSpec]]:
    """Runs of one shape together, no more than fit; shapes in the order of their first run.

    Args:
        specs: the runs, each once.
        size: how many runs of a shape fit into one fleet.

    Example:
        >>> specs = [RunSpec("digits", "0", method, seed) for method in ("plain", "joint") for seed in (0, 1, 2)]
        >>> [[(spec.method, spec.seed) for spec in fleet] for fleet in fleets(specs, lambda spec: 2)]
        [[('plain', 0), ('plain', 1)], [('plain', 2)], [('joint', 0), ('joint', 1)], [('joint', 2)]]
    """
    groups: dict[tuple[object, ...], list[RunSpec]] = {}
    for spec in dict.fromkeys(specs):
        groups.setdefault(shape(spec), []).append(spec)
    planned = []
    for group in groups.values():
        at_once = max(1, size(group[0]))
        planned += [group[start : start + at_once] for start in range(0, len(group), at_once)]
    return planned
