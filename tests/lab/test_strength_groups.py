"""Runs that differ in their strength alone sail their first task as one, and nothing in their results shows it."""

import itertools
import math
from dataclasses import replace

import pytest

from lab.small import class_stream, spec_for
from lab.test_checkpoint import continued, near, never_stopped, stopped_at, told
from mooring.lab.fleet import checkpoint
from mooring.lab.fleet.fleet import Fleet
from mooring.lab.fleet.grouping import group_into_fleets
from mooring.lab.model.spec import RunSpec

STREAM = class_stream(tasks=3, images=8)


def siblings(method: str, strengths=(0.1, 1.0, 10.0), seeds=(0, 1), **rest) -> list[RunSpec]:
    told_ = {"batch": 4, "epochs": 1, **rest}
    return [replace(spec_for(method, STREAM, seed, **told_), lr=0.02, strength=s) for s in strengths for seed in seeds]


class Widths:
    """How many runs a fleet stacks, step by step."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def on_step(self, fleet: Fleet) -> None:
        self.seen.append((fleet.position.task, len(fleet.stack)))

    def on_task_end(self, fleet: Fleet) -> None:
        pass


@pytest.mark.parametrize(
    "method",
    ["ewc", "si", "rwalk", "uniform", "random", "clamped-mas", "proximal-ewc", "budget-ewc", "budget-kronecker"],
)
def test_twins_end_as_they_would_alone(method):
    specs = siblings(method)
    together, _ = never_stopped(
        [*specs, *(siblings("plain", (None,)) if method not in ("clamped-mas", "budget-kronecker") else ())], STREAM
    )
    alone = {key: value for spec in specs for key, value in told(Fleet([spec], STREAM).run()).items()}
    near({spec.key: together[spec.key] for spec in specs}, alone, specs)
    assert len(set(alone.values())) == len(specs)


def test_twins_are_stacked_from_the_second_task_on():
    widths = Widths()
    Fleet([*siblings("ewc"), *siblings("explicit-ewc", (None,))], STREAM).run(widths)
    assert {width for task, width in widths.seen if task == 0} == {4}
    assert {width for task, width in widths.seen if task > 0} == {8}


def test_a_run_that_is_lost_in_its_first_task_takes_its_twins_along():
    specs = [replace(spec, lr=1e200) if spec.seed else spec for spec in siblings("ewc")]
    found = {result.spec: result for result in Fleet(specs, STREAM).run()}
    assert {spec.seed for spec, result in found.items() if result.status == "unstable"} == {1}
    assert set(found) == set(specs)
    assert len({(result.reason, result.steps) for result in found.values() if result.spec.seed}) == 1


def test_twins_are_judged_each_by_its_own_strength():
    specs = siblings("ewc", (0.1, 1e6), seeds=(0,))
    found = {result.spec.strength: result for result in Fleet(specs, STREAM, reject=True).run()}
    assert found[0.1].status == "finished"
    assert found[1e6].status == "rejected"
    ratio = found[1e6].stability[0].largest / found[0.1].stability[0].largest
    assert ratio == pytest.approx(1e7, rel=1e-6)


def test_the_time_of_a_first_task_is_shared_among_twins(monkeypatch):
    """On a clock that goes on by one each time it is read, all runs together took as long as it went."""
    clock = itertools.count()
    monkeypatch.setattr("mooring.lab.fleet.fleet.time.perf_counter", lambda: float(next(clock)))
    results = Fleet(siblings("ewc", (0.1, 1.0, 10.0), (0, 1)), STREAM).run()
    assert math.fsum(result.seconds for result in results) == pytest.approx(next(clock) - 1)


@pytest.mark.parametrize("stop", range(0, 9, 2))
def test_twins_stopped_anywhere_continue_all_or_some_of_them(stop, tmp_path):
    specs = [*siblings("ewc"), *siblings("si"), *siblings("plain", (None,))]
    expected, _ = never_stopped(specs, STREAM)
    path = tmp_path / "fleet"
    stopped_at(specs, STREAM, path, stop)
    assert checkpoint.runs_in(path) == {spec.key for spec in specs}
    assert continued(specs, STREAM, path) == expected  # to the last bit
    for some in (specs[3:], specs[1::2], specs[5:6]):
        near(continued(some, STREAM, path), expected, some)


def test_a_split_checkpoint_gives_every_part_its_own_twins(tmp_path):
    specs = siblings("ewc", seeds=(0, 1, 2))
    specs = [replace(spec, lr=1e200) if spec.seed == 2 else spec for spec in specs]
    expected, _ = never_stopped(specs, STREAM)
    for stop in (1, 3):
        stopped_at(specs, STREAM, tmp_path / "fleet", stop)
        parts = {tmp_path / "one": specs[:2], tmp_path / "other": specs[2:]}
        checkpoint.split(tmp_path / "fleet", {path: {s.key for s in part} for path, part in parts.items()})
        for path, part in parts.items():
            assert checkpoint.runs_in(path) == {spec.key for spec in part}
            near(continued(part, STREAM, path), expected, part)


def test_twins_are_planned_into_one_fleet():
    specs = siblings("ewc", (1.0, 2.0, 3.0), seeds=(0, 1))
    assert [{spec.seed for spec in fleet} for fleet in group_into_fleets(specs, lambda runs: 3)] == [{0}, {1}]
