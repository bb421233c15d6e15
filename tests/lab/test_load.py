"""Ten thousand runs in a study: planned, kept, shown and reported in seconds, in bounded memory."""

import json
import random
import resource
import time

import pytest

from mooring.lab.engines.local import Local
from mooring.lab.engines.runner import Aboard
from mooring.lab.engines.sizing import Sizes
from mooring.lab.model.results import Result
from mooring.lab.model.spec import RunSpec
from mooring.lab.streams import by_class, digits
from mooring.lab.study.store import Store
from mooring.lab.study.study import Study
from processes import Child, command

SECONDS = 5.0
"""Of this process's own time: others may be using the machine."""

MEGABYTES = 250
"""On top of what the process held before, imports of its own included: nearly the same for a thousand runs."""

STREAM = by_class(digits(), per_task=2)


def many() -> list[RunSpec]:
    """200 settings of five methods, with ten seeds each."""
    dials = [(lr / 100, 10.0**power) for lr in range(1, 21) for power in range(-5, 5)]
    methods = ("ewc", "mas", "si", "rwalk", "proximal-ewc")
    return [
        RunSpec("digits", STREAM.fingerprint, method, seed, lr=lr, strength=strength)
        for method in methods
        for lr, strength in dials
        for seed in range(10)
    ]


def result(spec: RunSpec, chance: random.Random) -> Result:
    matrix = [[chance.uniform(50, 100) for _ in range(5)] for _ in range(5)]
    losses = [[chance.random() for _ in range(20)] for _ in range(5)]
    layers = {"backbone.1": chance.random(), "backbone.3": chance.random()}
    told = {"importance": layers, "drift": layers, "cka": layers, "steps": 720, "seconds": 0.5}
    return Result(spec, "finished", "", [50.0] * 5, matrix, losses, **told)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder, chance = tmp_path_factory.mktemp("load"), random.Random(0)
    specs = many()
    assert len(set(specs)) == 10_000
    began = time.process_time()
    Store(folder / "study.sqlite").add([result(spec, chance) for spec in specs])
    assert time.process_time() - began < 2 * SECONDS
    return folder


def test_ten_thousand_runs_are_planned_in_seconds(tmp_path, monkeypatch):
    monkeypatch.setattr(Sizes, "_tried", lambda self, runs, stream, counted, work: counted)  # that is training
    specs, study = many(), Study(tmp_path / "study.sqlite")
    began = time.process_time()
    planned = study._planned(specs, Local(Aboard({STREAM.fingerprint: STREAM}, {}), study.checkpoints), False)
    assert time.process_time() - began < SECONDS
    assert sum(map(len, planned)) == 10_000


def test_ten_thousand_known_runs_are_found_in_seconds(folder):
    specs, study = many(), Study(folder / "study.sqlite")
    began = time.process_time()
    assert len(study.run(specs, {STREAM.fingerprint: STREAM})) == 10_000
    assert time.process_time() - began < SECONDS


def measured(*arguments: str) -> int:
    """The command, and on stderr what it took."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    status = command(*arguments)
    after = resource.getrusage(resource.RUSAGE_SELF)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(json.dumps({"seconds": seconds, "megabytes": (after.ru_maxrss - before.ru_maxrss) / 1024}))
    return status


@pytest.mark.parametrize("asked", [["show"], ["show", "--json"], ["report"]], ids=" ".join)
def test_ten_thousand_runs_are_shown_and_reported_in_seconds_and_in_bounded_memory(folder, asked):
    from lab.test_load import measured as target

    told = Child(folder, target, asked[0], "study.sqlite", *asked[1:]).ended()
    assert told.status == 0, told.err
    took = json.loads(told.out.splitlines()[-1])
    assert took["seconds"] < SECONDS, took
    assert took["megabytes"] < MEGABYTES, took
