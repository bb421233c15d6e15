"""Twins: runs that differ in their strength alone. Until a pull acts they are one, and one of them sails for all."""

from collections.abc import Sequence
from dataclasses import replace

from mooring.lab.methods import find_method
from mooring.lab.model.spec import RunSpec

__all__ = ["kin", "twins"]


def kin(spec: RunSpec) -> str:
    """What twins have in common: the key of the run without its strength, which counts from the second task on.

    Where a method holds on to the start, it counts from the first step on, and nobody has a twin.

    Example:
        >>> weak, strong = (RunSpec("digits", "0", "ewc", 0, strength=strength) for strength in (1.0, 10.0))
        >>> kin(weak) == kin(strong), kin(weak) == kin(RunSpec("digits", "0", "ewc", 1, strength=1.0))
        (True, False)
    """
    alone = spec.strength is None or find_method(spec.method).anchors == "start"
    return (spec if alone else replace(spec, strength=None)).key


def twins(specs: Sequence[RunSpec]) -> dict[str, list[RunSpec]]:
    """Runs with their twins, by the key of the first of them, in the order given.

    Example:
        >>> specs = [RunSpec("digits", "0", "ewc", seed, strength=much) for much in (1.0, 10.0) for seed in (0, 1)]
        >>> [[(spec.seed, spec.strength) for spec in some] for some in twins(specs).values()]
        [[(0, 1.0), (0, 10.0)], [(1, 1.0), (1, 10.0)]]
    """
    found: dict[str, list[RunSpec]] = {}
    for spec in specs:
        found.setdefault(kin(spec), []).append(spec)
    return {some[0].key: some for some in found.values()}
