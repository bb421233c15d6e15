"""Tests of a study with ten thousand runs: planning, storing, showing and reporting take seconds and little memory."""

import json
import random
import resource
import time

import pytest

from laboratory.mooring_command import command
from mooring_lab.engines.engine import LocalEngine
from mooring_lab.engines.runner import RunContext
from mooring_lab.model.results import Result
from mooring_lab.model.spec import RunSpec
from mooring_lab.streams import by_class, digits
from mooring_lab.study.store import Store
from mooring_lab.study.study import Study
from processes import Child

MAX_SECONDS = 5.0
"""The limit of this process's CPU time, which other processes do not change."""

MAX_MEGABYTES = 250
"""The limit of additional memory, imports included; a thousand runs need nearly as much."""

STREAM = by_class(digits(), per_task=2)


def all_specs() -> list[RunSpec]:
    """Return 200 settings of five methods with ten seeds each."""
    settings = [(lr / 100, 10.0**power) for lr in range(1, 21) for power in range(-5, 5)]
    methods = ("ewc", "mas", "si", "rwalk", "proximal-ewc")
    return [
        RunSpec("digits", STREAM.fingerprint, method, seed, lr=lr, strength=strength)
        for method in methods
        for lr, strength in settings
        for seed in range(10)
    ]


def result(spec: RunSpec, rng: random.Random) -> Result:
    matrix = [[rng.uniform(50, 100) for _ in range(5)] for _ in range(5)]
    losses = [[rng.random() for _ in range(20)] for _ in range(5)]
    layers = {"backbone.1": rng.random(), "backbone.3": rng.random()}
    fields = {"importance": layers, "drift": layers, "cka": layers, "steps": 720, "seconds": 0.5}
    return Result(spec, "finished", "", [50.0] * 5, matrix, losses, **fields)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("load"), random.Random(0)
    specs = all_specs()
    assert len(set(specs)) == 10_000
    start = time.process_time()
    Store(folder / "study.sqlite").add([result(spec, rng) for spec in specs])
    assert time.process_time() - start < 2 * MAX_SECONDS
    Store(folder / "thousand.sqlite").add([result(spec, rng) for spec in specs[::10]])
    return folder


def test_ten_thousand_runs_are_planned_in_seconds(tmp_path):
    specs, study = all_specs(), Study(tmp_path / "study.sqlite")
    engine = LocalEngine(RunContext({STREAM.fingerprint: STREAM}, {}), study.checkpoints)
    start = time.process_time()
    fleets = study._plan_fleets(specs, engine, False)
    assert time.process_time() - start < MAX_SECONDS
    assert sum(map(len, fleets)) == 10_000


@pytest.mark.faults
def test_ten_thousand_stored_runs_are_read_in_seconds(folder):
    specs, study = all_specs(), Study(folder / "study.sqlite")
    start = time.process_time()
    assert len(study.run(specs, {STREAM.fingerprint: STREAM})) == 10_000
    assert time.process_time() - start < MAX_SECONDS


def measured(*arguments: str) -> int:
    """Run a command and print its CPU time and additional memory."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    status = command(*arguments)
    after = resource.getrusage(resource.RUSAGE_SELF)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(json.dumps({"seconds": seconds, "megabytes": (after.ru_maxrss - before.ru_maxrss) / 1024}))
    return status


def usage_of(folder, study: str, command: str, *arguments: str) -> dict[str, float]:
    """Return the CPU seconds and the additional megabytes of a command in a fresh process."""
    from laboratory.test_load import measured as target

    ended = Child(folder, target, command, f"{study}.sqlite", *arguments).ended()
    assert ended.status == 0, ended.err
    return json.loads(ended.out.splitlines()[-1])


@pytest.mark.faults
@pytest.mark.parametrize("arguments", [["show"], ["show", "--json"], ["report"]], ids=" ".join)
def test_ten_times_the_runs_are_shown_and_reported_in_less_than_ten_times_the_time(folder, arguments):
    thousand, ten_thousand = (usage_of(folder, study, *arguments) for study in ("thousand", "study"))
    assert ten_thousand["seconds"] < 10 * thousand["seconds"], (thousand, ten_thousand)
    assert ten_thousand["megabytes"] < MAX_MEGABYTES, ten_thousand
