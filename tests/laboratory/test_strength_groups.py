"""Runs that differ in their strength alone train their first task as one, without changing results."""

import itertools
import math
from dataclasses import replace

import pytest

from laboratory.small import class_stream, spec_for
from laboratory.test_checkpoint import assert_close_results, resumed, stop_at, uninterrupted, without_time
from mooring_lab.fleet import checkpoint
from mooring_lab.fleet.fleet import Fleet
from mooring_lab.fleet.grouping import group_into_fleets
from mooring_lab.model.spec import RunSpec

STREAM = class_stream(tasks=3, images=8)


def specs_for(method: str, strengths=(0.1, 1.0, 10.0), seeds=(0, 1)) -> list[RunSpec]:
    runs = ((strength, spec_for(method, STREAM, seed, batch=4, epochs=1)) for strength in strengths for seed in seeds)
    return [replace(spec, lr=0.02, strength=strength) for strength, spec in runs]


class StackSizes:
    """Records the task and the number of stacked runs in each step."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def on_step(self, fleet: Fleet) -> None:
        self.seen.append((fleet.position.task, len(fleet.stack)))

    def on_task_end(self, fleet: Fleet) -> None:
        pass


ALONE = ("clamped-mas", "budget-kronecker", "laplace-kronecker", "lwf")
"""Methods whose fleets have no plain runs."""


@pytest.mark.parametrize(
    "method",
    ["ewc", "si", "rwalk", "uniform", "random", "proximal-ewc", "budget-ewc", *ALONE],
)
def test_runs_of_a_strength_group_equal_the_runs_alone(method):
    specs = specs_for(method)
    others = specs_for("plain", (None,)) if method not in ALONE else []
    together, _ = uninterrupted([*specs, *others], STREAM)
    alone = {key: value for spec in specs for key, value in without_time(Fleet([spec], STREAM).run()).items()}
    assert_close_results({spec.key: together[spec.key] for spec in specs}, alone, specs)
    assert len(set(alone.values())) == len(specs)


def test_strength_groups_are_expanded_after_the_first_task():
    sizes = StackSizes()
    Fleet([*specs_for("ewc"), *specs_for("explicit-ewc", (None,))], STREAM).run(sizes)
    assert {size for task, size in sizes.seen if task == 0} == {4}
    assert {size for task, size in sizes.seen if task > 0} == {8}


def test_strength_group_that_fails_in_the_first_task_fails_as_a_whole():
    specs = [replace(spec, lr=1e200) if spec.seed else spec for spec in specs_for("ewc")]
    results = {result.spec: result for result in Fleet(specs, STREAM).run()}
    assert {spec.seed for spec, result in results.items() if result.status == "unstable"} == {1}
    assert set(results) == set(specs)
    assert len({(result.reason, result.steps) for result in results.values() if result.spec.seed}) == 1


def test_stability_is_judged_by_each_runs_own_strength():
    specs = specs_for("ewc", (0.1, 1e6), seeds=(0,))
    results = {result.spec.strength: result for result in Fleet(specs, STREAM, reject=True).run()}
    assert results[0.1].status == "finished"
    assert results[1e6].status == "rejected"
    ratio = results[1e6].stability[0].largest / results[0.1].stability[0].largest
    assert ratio == pytest.approx(1e7, rel=1e-6)


def test_time_of_the_first_task_is_divided_among_the_runs(monkeypatch):
    """On a clock that advances by one at each reading, the times of all runs sum to the whole time."""
    clock = itertools.count()
    monkeypatch.setattr("mooring_lab.fleet.fleet.time.perf_counter", lambda: float(next(clock)))
    results = Fleet(specs_for("ewc", (0.1, 1.0, 10.0), (0, 1)), STREAM).run()
    assert math.fsum(result.seconds for result in results) == pytest.approx(next(clock) - 1)


@pytest.mark.parametrize("stop", range(0, 9, 2))
def test_fleet_resumed_with_all_or_some_runs_equals_uninterrupted(stop, tmp_path):
    specs = [*specs_for("ewc"), *specs_for("si"), *specs_for("plain", (None,))]
    expected, _ = uninterrupted(specs, STREAM)
    path = tmp_path / "fleet"
    stop_at(specs, STREAM, path, stop)
    assert checkpoint.runs_in(path) == {spec.key for spec in specs}
    assert resumed(specs, STREAM, path) == expected  # to the last bit
    for selected in (specs[3:], specs[1::2], specs[5:6]):
        assert_close_results(resumed(selected, STREAM, path), expected, selected)


def test_split_checkpoint_divides_strength_groups(tmp_path):
    specs = specs_for("ewc", seeds=(0, 1, 2))
    specs = [replace(spec, lr=1e200) if spec.seed == 2 else spec for spec in specs]
    expected, _ = uninterrupted(specs, STREAM)
    for stop in (1, 3):
        stop_at(specs, STREAM, tmp_path / "fleet", stop)
        parts = {tmp_path / "one": specs[:2], tmp_path / "other": specs[2:]}
        checkpoint.split(tmp_path / "fleet", {path: {s.key for s in part} for path, part in parts.items()})
        for path, part in parts.items():
            assert checkpoint.runs_in(path) == {spec.key for spec in part}
            assert_close_results(resumed(part, STREAM, path), expected, part)


def test_strength_group_is_in_one_fleet():
    specs = specs_for("ewc", (1.0, 2.0, 3.0), seeds=(0, 1))
    assert [{spec.seed for spec in fleet} for fleet in group_into_fleets(specs, lambda runs: 3)] == [{0}, {1}]
