"""Fleets are as large as memory allows and as is fastest; probes leave no trace."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from laboratory.small import class_stream
from mooring_lab.engines import device_memory as memory
from mooring_lab.engines import engine, sizing
from mooring_lab.engines.runner import SilentReporter
from mooring_lab.engines.sizing import FIRST_PROBE_RUNS, MAX_RUNS, FleetSizer, SizeProbe
from mooring_lab.fleet.grouping import group_into_fleets, split_evenly
from mooring_lab.model.spec import RunSpec
from mooring_lab.streams import Stream
from mooring_lab.study.study import Study

STREAM = class_stream(tasks=2, images=100)
GIB = 1 << 30


def runs_of(number: int, method: str = "plain", **more) -> list[RunSpec]:
    """Return runs with enough work for a probe to pay."""
    options = {"epochs": 20_000, "batch": 10, **more}
    return [RunSpec("digits", STREAM.fingerprint, method, seed, **options) for seed in range(number)]


class Machine:
    """A simulated machine: what probes would show.

    Args:
        fixed: seconds of a step however few runs there are.
        per_run: seconds more for every run beyond `full`.
        full: so many runs at once cost nothing more.
        memory: of a fleet and of a run, in bytes; None on a CPU.
        room: bytes that are free.
        took: seconds of a probe.
        bad: by what factor each of the first probes is disturbed.
    """

    def __init__(self, fixed=0.001, per_run=1e-5, full=0, memory=None, room=64 * GIB, took=0.001, bad=()) -> None:
        self.fixed, self.per_run, self.full = fixed, per_run, full
        self.memory, self.room, self.took = memory, room, took
        self.bad, self.probed, self.notes = list(bad), list[int](), list[str]()

    def probe(self, specs, stream, *, device, weights):
        self.probed.append(len(specs))
        step = self.fixed + self.per_run * max(0, len(specs) - self.full)
        if self.bad:
            step *= self.bad.pop(0)
        peak = None
        if self.memory is not None:
            peak = self.memory[0] + len(specs) * self.memory[1]
            if peak > self.room:
                return None
        return SizeProbe(len(specs), step, self.took, peak)

    def sizes(self, device: str = "cpu", **more) -> FleetSizer:
        options = {"note": self.notes.append, "probe": self.probe, "free": lambda device: self.room, **more}
        return FleetSizer({STREAM.fingerprint: STREAM}, device=device, **options)


def parts(machine: Machine, runs: list[RunSpec], device: str = "cpu") -> list[int]:
    return [len(fleet) for fleet in group_into_fleets(runs, machine.sizes(device))]


# How fast


def test_size_doubles_while_that_is_clearly_faster_and_the_fastest_is_taken():
    machine = Machine(fixed=0.001, per_run=1e-4)  # a step of each: 225, 162, 131, 116, and 108 us, a gain of only 7 %
    assert parts(machine, runs_of(1000)) == [125] * 8
    assert machine.probed == [8, 16, 32, 64, 128, 128]
    assert "108 us for a step of each" in machine.notes[0]


def test_slower_size_is_not_taken():
    machine = Machine(full=32, per_run=1e-3)  # up to 32 for nothing, and then all the more
    assert set(parts(machine, runs_of(320))) == {32}
    assert machine.probed == [8, 16, 32, 64, 64]  # the last was probed twice before it was believed


def test_disturbed_probe_is_repeated():
    machine = Machine(full=1000, bad=[1, 1, 10])  # the probe of 32 was disturbed
    assert parts(machine, runs_of(128)) == [128]
    assert machine.probed == [8, 16, 32, 32, 64, 128]


def test_probes_have_no_more_runs_than_exist_or_may_train_together():
    machine = Machine(full=10_000)
    assert parts(machine, runs_of(40)) == [40]
    assert machine.probed == [8, 16, 32]  # 40 are no more than one and a half times 32
    machine = Machine(full=10_000)
    assert parts(machine, runs_of(1000)) == [125] * 8
    assert max(machine.probed) == MAX_RUNS["cpu"]


@pytest.mark.parametrize(
    ("first", "later", "probed_again"),
    [(320, 400, False), (320, 40, False), (40, 40, False), (40, 320, True)],
    ids=["limited by speed", "fewer runs", "as many runs", "more runs than were measured"],
)
def test_shape_that_was_measured_is_not_probed_again(first, later, probed_again):
    machine = Machine(full=64, per_run=1e-3)
    measured: sizing.MeasuredSizes = {}
    other = class_stream(tasks=1, images=60)
    assert other.fingerprint != STREAM.fingerprint
    machine.sizes(measured=measured)(runs_of(first))
    number = len(machine.probed)
    runs = [replace(run, data=other.fingerprint) for run in runs_of(later)]
    again = replace(machine.sizes(measured=measured), streams={other.fingerprint: other})
    assert again(runs) == min(later, 64)
    assert (len(machine.probed) > number) == probed_again


def test_study_measures_a_shape_once(tmp_path, monkeypatch):
    machine = Machine(full=1000)
    monkeypatch.setattr(engine, "FleetSizer", partial(FleetSizer, probe=machine.probe))
    monkeypatch.setattr(sizing, "MIN_PROBED_WORK", {"cpu": 1})
    study = Study(tmp_path / "study.sqlite")
    for lr in (0.1, 0.01):
        study.run([replace(run, lr=lr, epochs=1) for run in runs_of(20)], {STREAM.fingerprint: STREAM})
        assert machine.probed == [8, 16]


def test_fleets_have_equal_sizes_and_may_exceed_the_best_size_by_half():
    machine = Machine(full=64, per_run=1.0)
    for number, expected in ((64, [64]), (65, [65]), (96, [96]), (97, [49, 48]), (128, [64, 64]), (129, [43] * 3)):
        assert parts(machine, runs_of(number)) == expected, number


@pytest.mark.parametrize("number", [1, 2, 7, 64, 65, 1000])
@pytest.mark.parametrize("most", [1, 3, 64, 5000])
def test_parts_are_even_in_order_and_no_larger_than_they_may_be(number, most):
    runs = runs_of(number)
    split = split_evenly(runs, most)
    assert [run for part in split for run in part] == runs
    lengths = [len(part) for part in split]
    assert max(lengths) <= most
    assert max(lengths) - min(lengths) <= 1
    assert len(split) == -(-number // most)


@pytest.mark.parametrize("device", MAX_RUNS)
def test_fixed_size_measures_nothing(device):
    def never(*args, **more):
        pytest.fail("it was measured")

    options = {"device": device, "probe": never, "free": never, "fixed": True}
    sized = FleetSizer({STREAM.fingerprint: STREAM}, **options)
    assert sized(runs_of(40)) == 40
    assert sized(runs_of(10_000)) == MAX_RUNS[device]
    assert 1 <= FleetSizer({STREAM.fingerprint: STREAM}, **options)(runs_of(500, batch=2000)) < MAX_RUNS[device]


# How much memory


def test_memory_has_a_fixed_and_a_per_run_part_and_a_fifth_stays_free():
    machine = Machine(full=10_000, memory=(2 * GIB, GIB), room=100 * GIB)
    sized = machine.sizes("cuda")
    assert sized(runs_of(500)) == 77  # 0.8 * 100, less 2, less the images
    assert max(machine.probed) <= 77
    (note,) = machine.notes
    assert note.startswith("500 runs of mlp, 72 at a time: ")
    assert note.endswith("and more do not fit into memory")


def test_test_images_that_stay_on_the_device_leave_less_room(monkeypatch):
    machine = Machine(full=10_000, memory=(2 * GIB, GIB), room=100 * GIB)
    monkeypatch.setattr(sizing, "resident_bytes", lambda test: 10 * GIB)
    assert machine.sizes("cuda")(runs_of(500)) == 67


def test_runs_are_split_only_if_memory_does_not_hold_them():
    machine = Machine(full=10_000, memory=(0, GIB), room=100 * GIB)
    assert parts(machine, runs_of(79), "cuda") == [79]  # 0.8 * 100, less the images
    assert parts(machine, runs_of(80), "cuda") == [40, 40]


def test_probe_that_does_not_fit_is_the_last():
    machine = Machine(full=10_000, memory=(0, GIB), room=1000 * GIB)

    def cramped(specs, *args, **more):
        return None if len(specs) > 20 else machine.probe(specs, *args, **more)

    sized = machine.sizes("cuda", probe=cramped)
    assert sized(runs_of(400)) == 16
    (note,) = machine.notes
    assert "more do not fit into memory" in note


def test_fleet_is_smaller_than_a_first_probe_that_does_not_fit():
    machine = Machine(memory=(0, GIB), room=4 * GIB)
    assert machine.sizes("cuda")(runs_of(400)) == FIRST_PROBE_RUNS // 2
    assert machine.probed == [FIRST_PROBE_RUNS]


def test_runs_train_one_by_one_if_images_leave_no_memory():
    machine = Machine(memory=(0, GIB), room=100 * GIB)
    frees = iter([100 * GIB, 0])
    assert machine.sizes("cuda", free=lambda device: next(frees))(runs_of(400)) == 1


def test_small_estimate_on_a_cpu_needs_no_probe():
    machine = Machine(room=1 << 20)
    assert max(parts(machine, runs_of(100))) < 8
    assert machine.probed == []


def test_free_memory_is_what_the_machine_says_and_a_container_allows(tmp_path):
    file = tmp_path / "told"
    file.write_text("MemTotal:       24000000 kB\nMemFree:         1000 kB\nMemAvailable:   2048 kB\n")
    assert memory._available(file) == 2 << 20
    assert memory._available(tmp_path / "nothing") == memory.ASSUMED_FREE_BYTES
    file.write_text("3000000\n")
    assert memory._container_limit(file) == 3_000_000
    file.write_text("max\n")
    assert memory._container_limit(file) > 1 << 60
    assert 0 < memory.free_memory("cpu") < 1 << 60


def test_on_a_gpu_the_peak_is_what_was_reserved_above_what_was_before(monkeypatch):
    said = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: said.append("empty"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: said.append(f"reset {device}"))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 100)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 700)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5000, 9000))
    assert memory.PeakMemory("cuda:1").bytes() == 600
    assert said == ["empty", "reset cuda:1"]
    assert memory.free_memory("cuda:1") == 5000
    assert said[2:] == ["empty"]  # what PyTorch keeps for later is free


# When a probe pays


def test_few_runs_or_little_work_need_no_probe():
    machine = Machine(full=1000)
    assert parts(machine, runs_of(16)) == [16]
    assert parts(machine, runs_of(100, epochs=1)) == [100]
    assert parts(machine, runs_of(1000, epochs=1)) == [125] * 8
    assert machine.probed == []
    assert machine.notes == []


def test_expensive_probe_is_not_followed_by_another():
    machine = Machine(full=1000, took=1e6)
    assert parts(machine, runs_of(100)) == [100]
    assert machine.probed == [8, 16]  # in the first, much is done for the first time
    assert machine.notes == []  # nothing was found out


def test_probe_that_lost_runs_is_ignored():
    machine = Machine(full=1000)
    lossy = machine.sizes(probe=lambda specs, *args, **more: replace(machine.probe(specs, *args, **more), runs=3))
    assert lossy(runs_of(100)) == 100
    assert machine.probed == [8]


def test_each_shape_is_probed_once():
    machine = Machine(full=1000)
    sized = machine.sizes()
    sized(runs_of(100))
    before = len(machine.probed)
    sized(runs_of(100))
    assert len(machine.probed) == before
    sized(runs_of(100, batch=5))
    assert len(machine.probed) == 2 * before


def test_runs_that_take_most_memory_are_probed_first():
    seen = []

    def spy(specs, stream, **more):
        seen.append([spec.method for spec in specs])
        return machine.probe(specs, stream, **more)

    machine = Machine(full=1000)
    runs = [run for method in ("plain", "ewc", "si") for run in runs_of(30, method, strength=None)]
    machine.sizes(probe=spy)(runs)
    assert seen[0] == ["si"] * 8
    assert seen[2] == ["si"] * 30 + ["ewc"] * 2


def test_chosen_size_and_reason_are_noted_in_one_line():
    machine = Machine(full=64, per_run=1.0)
    parts(machine, runs_of(100))
    parts(machine, runs_of(90))
    assert machine.notes == [
        "100 runs of mlp, 50 at a time: 16 us for a step of each, and more at once are no faster",
        "90 runs of mlp, all at once: 16 us for a step of each",
    ]


# In a study


class NotingReporter(SilentReporter):
    def __init__(self) -> None:
        self.notes, self.closed = list[str](), False

    def note(self, line) -> None:
        self.notes.append(line)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def eager(monkeypatch):
    """Trials of two runs and more, however little there is to do."""
    monkeypatch.setattr(sizing, "MAX_RUNS_UNPROBED", 2)
    monkeypatch.setattr(sizing, "FIRST_PROBE_RUNS", 2)
    monkeypatch.setattr(sizing, "MAX_PROBE_SHARE", 1e9)
    monkeypatch.setattr(sizing, "MIN_PROBED_WORK", {"cpu": 0})


SETTINGS = {"network": "mlp", "batch": 10, "epochs": 1, "dtype": "float64", "lr": 0.05}


def small() -> Stream:
    return class_stream(2, 20)


def test_probe_does_not_change_the_results_of_a_study(tmp_path, eager, monkeypatch):
    reporter = NotingReporter()
    Study(tmp_path / "probed.sqlite", reporter=reporter).compare(
        methods="plain,ewc", seeds=4, stream=small(), **SETTINGS
    )
    assert [note.split(":")[0].split(", ")[0] for note in reporter.notes] == ["8 runs of mlp"]
    monkeypatch.undo()
    Study(tmp_path / "plain.sqlite").compare(methods="plain,ewc", seeds=4, stream=small(), **SETTINGS)
    results, expected = (
        {result.spec.key: (result.matrix, result.steps) for result in Study(tmp_path / name).results()}
        for name in ("probed.sqlite", "plain.sqlite")
    )
    assert results == expected
    assert len(results) == 8


def test_given_fleet_size_needs_no_probe(tmp_path, eager, monkeypatch):
    monkeypatch.setattr(sizing, "Fleet", None)
    reporter = NotingReporter()
    Study(tmp_path / "s.sqlite", fleet=4, reporter=reporter).compare(
        methods="plain", seeds=6, stream=small(), **SETTINGS
    )
    assert reporter.notes == []


def test_interrupted_probe_leaves_nothing_behind(tmp_path, eager, monkeypatch):
    def pressed(*args):
        raise KeyboardInterrupt

    reporter, before = NotingReporter(), torch.get_rng_state()
    path = tmp_path / "s.sqlite"
    with monkeypatch.context() as during:
        during.setattr(sizing._StepTimer, "on_step", pressed)
        with pytest.raises(KeyboardInterrupt):
            Study(path, reporter=reporter).compare(methods="plain", seeds=4, stream=small(), **SETTINGS)
    assert reporter.closed
    assert torch.equal(torch.get_rng_state(), before)
    assert list((tmp_path / "s.sqlite.fleets").glob("*")) == []
    (row,) = Study(path).compare(methods="plain", seeds=4, stream=small(), **SETTINGS)
    assert len(row.results) == 4
