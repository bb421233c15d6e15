"""Fleets are as large as memory allows and as is fastest; what is tried to find out leaves no trace."""

from dataclasses import replace

import pytest
import torch

from lab.small import class_stream
from mooring.lab.engines import device_memory as memory
from mooring.lab.engines import size_probe as trial
from mooring.lab.engines import sizing as sizes
from mooring.lab.engines.reporting import SilentReporter
from mooring.lab.engines.size_probe import SizeProbe
from mooring.lab.engines.sizing import FIRST_PROBE_RUNS, MAX_RUNS, FleetSizer
from mooring.lab.fleet.grouping import group_into_fleets, split_evenly
from mooring.lab.model.spec import RunSpec
from mooring.lab.streams import Stream
from mooring.lab.study.study import Study

STREAM = class_stream(tasks=2, images=100)
GIB = 1 << 30


def runs_of(number: int, method: str = "plain", **rest) -> list[RunSpec]:
    """Enough work for a trial to pay."""
    told = {"epochs": 20_000, "batch": 10, **rest}
    return [RunSpec("digits", STREAM.fingerprint, method, seed, **told) for seed in range(number)]


class Machine:
    """What trials would show.

    Args:
        fixed: seconds of a step however few runs there are.
        each: seconds more for every run beyond `full`.
        full: so many runs at once cost nothing more.
        memory: of a fleet and of a run, in bytes; None on a CPU.
        room: bytes that are free.
        took: seconds of a trial.
        bad: by what factor each of the first trials is disturbed.
    """

    def __init__(self, fixed=0.001, each=1e-5, full=0, memory=None, room=64 * GIB, took=0.001, bad=()) -> None:
        self.fixed, self.each, self.full, self.memory, self.room, self.took = fixed, each, full, memory, room, took
        self.bad, self.tried, self.notes = list(bad), list[int](), list[str]()

    def trial(self, specs, stream, *, device, weights):
        self.tried.append(len(specs))
        step = self.fixed + self.each * max(0, len(specs) - self.full)
        if self.bad:
            step *= self.bad.pop(0)
        peak = None
        if self.memory is not None:
            peak = self.memory[0] + len(specs) * self.memory[1]
            if peak > self.room:
                return None
        return SizeProbe(len(specs), step, self.took, peak)

    def sizes(self, device: str = "cpu", **rest) -> FleetSizer:
        told = {"note": self.notes.append, "probe": self.trial, "free": lambda device: self.room, **rest}
        return FleetSizer({STREAM.fingerprint: STREAM}, device=device, **told)


def parts(machine: Machine, runs: list[RunSpec], device: str = "cpu") -> list[int]:
    return [len(fleet) for fleet in group_into_fleets(runs, machine.sizes(device))]


# How fast


def test_twice_as_many_are_tried_while_that_is_clearly_faster_and_the_fastest_is_taken():
    machine = Machine(fixed=0.001, each=1e-4)  # a step of each: 225, 162, 131, 116, and 108 us, a gain of only 7 %
    assert parts(machine, runs_of(1000)) == [125] * 8
    assert machine.tried == [8, 16, 32, 64, 128, 128]
    assert "108 us for a step of each" in machine.notes[0]


def test_a_size_that_is_only_slower_is_not_taken():
    machine = Machine(full=32, each=1e-3)  # up to 32 for nothing, and then all the more
    assert set(parts(machine, runs_of(320))) == {32}
    assert machine.tried == [8, 16, 32, 64, 64]  # the last was tried twice before it was believed


def test_something_else_that_used_the_machine_for_a_moment_does_not_decide():
    machine = Machine(full=1000, bad=[1, 1, 10])  # the trial of 32 was disturbed
    assert parts(machine, runs_of(128)) == [128]
    assert machine.tried == [8, 16, 32, 32, 64, 128]


def test_no_more_runs_than_there_are_and_than_are_worth_it_are_tried():
    machine = Machine(full=10_000)
    assert parts(machine, runs_of(40)) == [40]
    assert machine.tried == [8, 16, 32]  # 40 are no more than one and a half times 32
    machine = Machine(full=10_000)
    assert parts(machine, runs_of(1000)) == [125] * 8
    assert max(machine.tried) == MAX_RUNS["cpu"]


def test_fleets_are_of_one_size_and_a_few_more_sail_along():
    machine = Machine(full=64, each=1.0)
    for number, expected in ((64, [64]), (65, [65]), (96, [96]), (97, [49, 48]), (128, [64, 64]), (129, [43] * 3)):
        assert parts(machine, runs_of(number)) == expected, number


@pytest.mark.parametrize("number", [1, 2, 7, 64, 65, 1000])
@pytest.mark.parametrize("most", [1, 3, 64, 5000])
def test_parts_are_even_in_order_and_no_larger_than_they_may_be(number, most):
    runs = runs_of(number)
    made = split_evenly(runs, most)
    assert [run for part in made for run in part] == runs
    lengths = [len(part) for part in made]
    assert max(lengths) <= most
    assert max(lengths) - min(lengths) <= 1
    assert len(made) == -(-number // most)


@pytest.mark.parametrize("device", MAX_RUNS)
def test_a_fixed_size_asks_neither_a_clock_nor_how_much_is_free(device):
    def never(*args, **rest):
        pytest.fail("it was measured")

    told = {"device": device, "probe": never, "free": never, "fixed": True}
    sized = FleetSizer({STREAM.fingerprint: STREAM}, **told)
    assert sized(runs_of(40)) == 40
    assert sized(runs_of(10_000)) == MAX_RUNS[device]
    assert 1 <= FleetSizer({STREAM.fingerprint: STREAM}, **told)(runs_of(500, batch=2000)) < MAX_RUNS[device]


# How much memory


def test_memory_is_a_fleets_and_each_runs_and_a_fifth_of_it_stays_free():
    machine = Machine(full=10_000, memory=(2 * GIB, GIB), room=100 * GIB)
    sized = machine.sizes("cuda")
    assert sized(runs_of(500)) == 77  # 0.8 * 100, less 2, less the images
    assert max(machine.tried) <= 77
    (note,) = machine.notes
    assert note.startswith("500 runs of mlp, 72 at a time: ")
    assert note.endswith("and more do not fit into memory")


def test_test_images_that_stay_on_the_device_leave_less_room(monkeypatch):
    machine = Machine(full=10_000, memory=(2 * GIB, GIB), room=100 * GIB)
    monkeypatch.setattr(sizes, "resident_bytes", lambda test: 10 * GIB)
    assert machine.sizes("cuda")(runs_of(500)) == 67


def test_what_memory_holds_is_not_split_further_and_what_it_does_not_is():
    machine = Machine(full=10_000, memory=(0, GIB), room=100 * GIB)
    assert parts(machine, runs_of(79), "cuda") == [79]  # 0.8 * 100, less the images
    assert parts(machine, runs_of(80), "cuda") == [40, 40]


def test_a_trial_that_does_not_fit_is_the_end_of_trying():
    machine = Machine(full=10_000, memory=(0, GIB), room=1000 * GIB)

    def cramped(specs, *args, **rest):
        return None if len(specs) > 20 else machine.trial(specs, *args, **rest)

    sized = machine.sizes("cuda", probe=cramped)
    assert sized(runs_of(400)) == 16
    (note,) = machine.notes
    assert "more do not fit into memory" in note


def test_where_not_even_the_first_trial_fits_fewer_sail():
    machine = Machine(memory=(0, GIB), room=4 * GIB)
    assert machine.sizes("cuda")(runs_of(400)) == FIRST_PROBE_RUNS // 2
    assert machine.tried == [FIRST_PROBE_RUNS]


def test_where_images_leave_no_room_runs_sail_one_by_one():
    machine = Machine(memory=(0, GIB), room=100 * GIB)
    frees = iter([100 * GIB, 0])
    assert machine.sizes("cuda", free=lambda device: next(frees))(runs_of(400)) == 1


def test_by_a_rough_count_little_memory_makes_small_fleets_without_a_trial():
    machine = Machine(room=1 << 20)
    assert max(parts(machine, runs_of(100))) < 8
    assert machine.tried == []


def test_free_memory_is_what_the_machine_says_and_a_container_allows(tmp_path):
    told = tmp_path / "told"
    told.write_text("MemTotal:       24000000 kB\nMemFree:         1000 kB\nMemAvailable:   2048 kB\n")
    assert memory._available(told) == 2 << 20
    assert memory._available(tmp_path / "nothing") == memory.ASSUMED_FREE_BYTES
    told.write_text("3000000\n")
    assert memory._container_limit(told) == 3_000_000
    told.write_text("max\n")
    assert memory._container_limit(told) > 1 << 60
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


# When a trial pays


def test_few_runs_or_little_work_are_not_worth_a_trial():
    machine = Machine(full=1000)
    assert parts(machine, runs_of(16)) == [16]
    assert parts(machine, runs_of(100, epochs=1)) == [100]
    assert parts(machine, runs_of(1000, epochs=1)) == [125] * 8
    assert machine.tried == []
    assert machine.notes == []


def test_a_trial_that_takes_long_beside_the_work_is_not_followed_by_another():
    machine = Machine(full=1000, took=1e6)
    assert parts(machine, runs_of(100)) == [100]
    assert machine.tried == [8, 16]  # in the first, much is done for the first time
    assert machine.notes == []  # nothing was found out


def test_where_runs_are_lost_in_a_trial_it_counts_for_nothing():
    machine = Machine(full=1000)
    lossy = machine.sizes(probe=lambda specs, *args, **rest: replace(machine.trial(specs, *args, **rest), runs=3))
    assert lossy(runs_of(100)) == 100
    assert machine.tried == [8]


def test_a_shape_is_tried_once_and_another_for_itself():
    machine = Machine(full=1000)
    sized = machine.sizes()
    sized(runs_of(100))
    before = len(machine.tried)
    sized(runs_of(100))
    assert len(machine.tried) == before
    sized(runs_of(100, batch=5))
    assert len(machine.tried) == 2 * before


def test_what_is_tried_is_what_takes_most_memory_method_by_method():
    seen = []

    def spy(specs, stream, **rest):
        seen.append([spec.method for spec in specs])
        return machine.trial(specs, stream, **rest)

    machine = Machine(full=1000)
    runs = [run for method in ("plain", "ewc", "si") for run in runs_of(30, method, strength=None)]
    machine.sizes(probe=spy)(runs)
    assert seen[0] == ["si"] * 8
    assert seen[2] == ["si"] * 30 + ["ewc"] * 2


def test_what_was_chosen_and_why_is_told_in_one_line():
    machine = Machine(full=64, each=1.0)
    parts(machine, runs_of(100))
    parts(machine, runs_of(90))
    assert machine.notes == [
        "100 runs of mlp, 50 at a time: 16 us for a step of each, and more at once are no faster",
        "90 runs of mlp, all at once: 16 us for a step of each",
    ]


# In a study


class Noting(SilentReporter):
    def __init__(self) -> None:
        self.notes, self.closed = list[str](), False

    def note(self, line) -> None:
        self.notes.append(line)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def eager(monkeypatch):
    """Trials of two runs and more, however little there is to do."""
    monkeypatch.setattr(sizes, "MAX_RUNS_UNPROBED", 2)
    monkeypatch.setattr(sizes, "FIRST_PROBE_RUNS", 2)
    monkeypatch.setattr(sizes, "MAX_PROBE_SHARE", 1e9)
    monkeypatch.setattr(sizes, "MIN_PROBED_WORK", {"cpu": 0})


TOLD = {"network": "mlp", "batch": 10, "epochs": 1, "dtype": "float64", "lr": 0.05}


def small() -> Stream:
    return class_stream(2, 20)


def test_a_study_after_a_trial_gives_what_it_gives_without(tmp_path, eager, monkeypatch):
    noting = Noting()
    Study(tmp_path / "tried.sqlite", reporter=noting).compare(methods="plain,ewc", seeds=4, stream=small(), **TOLD)
    assert [note.split(":")[0].split(", ")[0] for note in noting.notes] == ["8 runs of mlp"]
    monkeypatch.undo()
    Study(tmp_path / "plain.sqlite").compare(methods="plain,ewc", seeds=4, stream=small(), **TOLD)
    found, expected = (
        {result.spec.key: (result.matrix, result.steps) for result in Study(tmp_path / name).results()}
        for name in ("tried.sqlite", "plain.sqlite")
    )
    assert found == expected
    assert len(found) == 8


def test_where_the_most_runs_at_once_are_given_nothing_is_tried(tmp_path, eager, monkeypatch):
    monkeypatch.setattr(trial, "Fleet", None)
    noting = Noting()
    Study(tmp_path / "s.sqlite", fleet=4, reporter=noting).compare(methods="plain", seeds=6, stream=small(), **TOLD)
    assert noting.notes == []


def test_interrupted_in_a_trial_nothing_is_left_and_the_next_time_is_as_the_first(tmp_path, eager, monkeypatch):
    def pressed(*args):
        raise KeyboardInterrupt

    noting, before = Noting(), torch.get_rng_state()
    path = tmp_path / "s.sqlite"
    with monkeypatch.context() as during:
        during.setattr(trial._StepTimer, "on_step", pressed)
        with pytest.raises(KeyboardInterrupt):
            Study(path, reporter=noting).compare(methods="plain", seeds=4, stream=small(), **TOLD)
    assert noting.closed
    assert torch.equal(torch.get_rng_state(), before)
    assert list((tmp_path / "s.sqlite.fleets").glob("*")) == []
    (row,) = Study(path).compare(methods="plain", seeds=4, stream=small(), **TOLD)
    assert len(row.results) == 4
