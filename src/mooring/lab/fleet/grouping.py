"""Which runs sail together."""

from collections.abc import Callable, Sequence
from itertools import pairwise

from mooring.lab.fleet.shape import shape
from mooring.lab.fleet.strength_groups import twins
from mooring.lab.model.spec import RunSpec

__all__ = ["evenly", "fleets"]


def fleets(specs: Sequence[RunSpec], size: Callable[[list[RunSpec]], int]) -> list[list[RunSpec]]:
    """Runs of one shape together, as many at a time as is said; shapes in the order of their first run.

    Twins are neighbours, so that few fleets have some of them.

    Args:
        specs: the runs, each once.
        size: how many runs at most go into one fleet, told all runs of a shape.

    Example:
        >>> specs = [RunSpec("digits", "0", method, seed) for method in ("plain", "joint") for seed in (0, 1, 2)]
        >>> [[(spec.method, spec.seed) for spec in fleet] for fleet in fleets(specs, lambda runs: 2)]
        [[('plain', 0), ('plain', 1)], [('plain', 2)], [('joint', 0), ('joint', 1)], [('joint', 2)]]
    """
    groups: dict[tuple[object, ...], list[RunSpec]] = {}
    for spec in dict.fromkeys(specs):
        groups.setdefault(shape(spec), []).append(spec)
    sided = ([spec for some in twins(group).values() for spec in some] for group in groups.values())
    return [fleet for group in sided for fleet in evenly(group, size(group))]


def evenly(runs: Sequence[RunSpec], most: int) -> list[list[RunSpec]]:
    """Neighbouring runs in as few parts as there must be, of sizes that differ by one at most.

    Args:
        runs: the runs.
        most: how many may be in a part.

    Example:
        >>> [len(part) for part in evenly([RunSpec("digits", "0", "plain", seed) for seed in range(65)], 32)]
        [22, 22, 21]
    """
    count = -(-len(runs) // max(1, most))
    each, more = divmod(len(runs), count)
    ends = [part * each + min(part, more) for part in range(count + 1)]
    return [list(runs[begin:end]) for begin, end in pairwise(ends)]
