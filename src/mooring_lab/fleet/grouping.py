"""Which runs train together: the key of a fleet, runs that share their first task, and the division into fleets."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

from mooring.errors import MooringError
from mooring_lab.model.known_methods import find_method, method_rank
from mooring_lab.model.spec import RunSpec


def fleet_shape(spec: RunSpec) -> tuple[object, ...]:
    """Return what two runs must agree in to train in one fleet.

    Runs of a fleet may differ in seed, initial weights, strength, heads, schedule and the numbers of the optimizer.

    Example:
        >>> one = RunSpec("digits", "0", "ewc", seed=0, strength=1.0)
        >>> fleet_shape(one) == fleet_shape(RunSpec("digits", "0", "explicit-si", seed=3, lr=0.5, momentum=0.0))
        True
    """
    method = find_method(spec.method)
    training = (spec.data, spec.network, spec.epochs, spec.batch, spec.memory, spec.flips, spec.shifts, spec.dtype)
    name = method.name if method.plugin and method.plugin.one_method else ""
    learning = (spec.optimizer, method.plugin, name, method.observes_outputs, method.observes_layers)
    return (*training, spec.buffers, *learning)


def strength_group_key(spec: RunSpec) -> str:
    """Return the key that runs share when they differ in their strength alone: the run's key without its strength.

    The strength has no effect in the first task, so such runs train it as one. A method whose strength acts from the
    first step is the exception, such as one that anchors at the initial weights: the run's own key is returned.

    Example:
        >>> weak, strong = (RunSpec("digits", "0", "ewc", 0, strength=strength) for strength in (1.0, 10.0))
        >>> strength_group_key(weak) == strength_group_key(strong)
        True
        >>> strength_group_key(weak) == strength_group_key(RunSpec("digits", "0", "ewc", 1, strength=1.0))
        False
    """
    ungrouped = spec.strength is None or find_method(spec.method).strength_acts_at_once
    return (spec if ungrouped else replace(spec, strength=None)).key


def strength_groups(specs: Sequence[RunSpec]) -> dict[str, list[RunSpec]]:
    """Group the runs that differ in their strength alone, by the key of each group's first run, in the order given.

    Example:
        >>> specs = [RunSpec("digits", "0", "ewc", seed, strength=value) for value in (1.0, 10.0) for seed in (0, 1)]
        >>> [[(spec.seed, spec.strength) for spec in group] for group in strength_groups(specs).values()]
        [[(0, 1.0), (0, 10.0)], [(1, 1.0), (1, 10.0)]]
    """
    groups: dict[str, list[RunSpec]] = {}
    for spec in specs:
        groups.setdefault(strength_group_key(spec), []).append(spec)
    return {group[0].key: group for group in groups.values()}


def groups_of_fleet(specs: Sequence[RunSpec], scenario: str) -> dict[str, list[RunSpec]]:
    """Check that runs can be one fleet, and return its strength groups; those of a method are neighbours.

    Example:
        >>> list(groups_of_fleet([RunSpec("digits", "0", "er", 0), RunSpec("digits", "0", "plain", 0)], "task"))
        Traceback (most recent call last):
        ...
        mooring.errors.MooringError: a fleet takes runs of one shape, and at least one: they differ in more than seeds
    """
    if not specs or len({fleet_shape(spec) for spec in specs}) > 1:
        raise MooringError("a fleet takes runs of one shape, and at least one: they differ in more than seeds")
    for spec in specs:
        find_method(spec.method).check_run(spec.memory, scenario)
    return strength_groups(sorted(specs, key=lambda spec: (method_rank(spec.method), spec.method, spec.seed, spec.key)))


def group_into_fleets(specs: Sequence[RunSpec], size: Callable[[list[RunSpec]], int]) -> list[list[RunSpec]]:
    """Divide runs into fleets: runs of one shape each, shapes in the order of their first run.

    The runs of a strength group are neighbours, so that few groups are divided among fleets.

    Args:
        specs: the runs; repeated ones count once.
        size: takes all runs of a shape and returns how many of them go into one fleet at most.

    Example:
        >>> specs = [RunSpec("digits", "0", method, seed) for method in ("plain", "joint") for seed in (0, 1, 2)]
        >>> [[(spec.method, spec.seed) for spec in fleet] for fleet in group_into_fleets(specs, lambda runs: 2)]
        [[('plain', 0), ('plain', 1)], [('plain', 2)], [('joint', 0), ('joint', 1)], [('joint', 2)]]
    """
    shapes: dict[tuple[object, ...], list[RunSpec]] = {}
    for spec in dict.fromkeys(specs):
        shapes.setdefault(fleet_shape(spec), []).append(spec)
    ordered = ([spec for group in strength_groups(runs).values() for spec in group] for runs in shapes.values())
    return [fleet for runs in ordered for fleet in split_evenly(runs, size(runs))]


def split_evenly(runs: Sequence[RunSpec], max_size: int) -> list[list[RunSpec]]:
    """Split runs into as few parts of neighbours as possible, whose sizes differ by at most one.

    Args:
        runs: the runs.
        max_size: the largest allowed size of a part.

    Example:
        >>> [len(part) for part in split_evenly([RunSpec("digits", "0", "plain", seed) for seed in range(65)], 32)]
        [22, 22, 21]
    """
    count = -(-len(runs) // max(1, max_size))
    size, larger = divmod(len(runs), count)
    ends = [part * size + min(part, larger) for part in range(count + 1)]
    return [list(runs[begin:end]) for begin, end in pairwise(ends)]
