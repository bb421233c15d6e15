"""A fleet that does not fit into memory goes on in halves from its last checkpoint, and gives the same."""

import io
import os
import tempfile
import weakref
from dataclasses import replace
from functools import cache
from itertools import count, pairwise
from pathlib import Path

import pytest
import torch
from rich.console import Console

from lab.small import class_stream, spec_for
from mooring.cli.study_progress import BarReporter, LineReporter
from mooring.errors import MooringError
from mooring.lab.engines import runner
from mooring.lab.engines.checkpoint_index import CheckpointIndex
from mooring.lab.engines.reporting import SilentReporter
from mooring.lab.engines.signals import InterruptedStudyError
from mooring.lab.fleet.fleet import Fleet
from mooring.lab.model.results import Result
from mooring.lab.model.spec import RunSpec
from mooring.lab.study.study import Study

STREAM = class_stream(tasks=3, images=12)
STEPS = 9  # of a run: three tasks of three steps
STREAMS = {STREAM.fingerprint: STREAM}


class Cramped(Fleet):
    """A fleet on a device that holds `most` runs: more fail in step `at`, or, where that is None, at once."""

    most: int
    at: int | None
    made: list["weakref.ref[object]"]
    sailed: list[int]
    taken: int

    def __init__(self, specs, *args, **rest) -> None:
        assert [each for each in Cramped.made if each() is not None] == [], "another fleet is still in memory"
        super().__init__(specs, *args, **rest)
        Cramped.made.append(weakref.ref(self))
        if Cramped.at is None and len(specs) > Cramped.most:
            self.no_room()

    def no_room(self):
        Cramped.made.append(weakref.ref(self.stack))  # what takes the memory; it holds itself
        raise torch.OutOfMemoryError("CUDA out of memory. SizeProbe to allocate 20.00 MiB")

    def run(self, watcher=None):
        Cramped.sailed.append(len(self.specs))
        return super().run(watcher)

    def _step(self, *args):
        if Cramped.at is not None and self.steps >= Cramped.at and len(self.specs) > Cramped.most:
            self.no_room()
        Cramped.taken += len(self.specs)
        super()._step(*args)


@pytest.fixture(autouse=True)
def _cramped(monkeypatch):
    Cramped.most, Cramped.at, Cramped.made, Cramped.sailed, Cramped.taken = 10**6, 0, [], [], 0
    monkeypatch.setattr(runner, "Fleet", Cramped)


def runs_of(methods: str, seeds: int = 4, **rest) -> list[RunSpec]:
    told = {"batch": 4, "epochs": 1, **rest}
    return [spec_for(method, STREAM, seed, **told) for method in methods.split(",") for seed in range(seeds)]


class Listening(SilentReporter):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.notes, self.work = list[str](), list[int]()
        self.done: dict[int, list[int]] = {}
        self.ended: dict[int, int] = {}

    def begin(self, fleets, work, done) -> None:
        self.work = list(work)

    def advanced(self, number, fleet, done) -> None:
        assert number not in self.ended
        self.done.setdefault(number, []).append(done)

    def finished(self, number, results) -> None:
        assert number not in self.ended
        self.ended[number] = len(results)

    def note(self, line) -> None:
        self.notes.append(line)


def ran(path: Path, runs: list[RunSpec], *, reject: bool = False, **how) -> list[Result]:
    return Study(path, **how).run(runs, STREAMS, reject=reject)


def near(found: list[Result], expected: list[Result]) -> None:
    """The same runs with the same results, to nine digits."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one.spec, one.status, one.reason, one.steps) == (other.spec, other.status, other.reason, other.steps)
        assert (one.untrained, one.matrix) == (other.untrained, other.matrix)
        for mine, theirs in zip(numbers(one), numbers(other), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


def numbers(result: Result) -> list[torch.Tensor]:
    told = (result.losses, *(list(each.values()) for each in (result.drift, result.cka, result.importance)))
    return [torch.tensor(each, dtype=torch.float64) for each in told]


MIXED = "plain,ewc,explicit-si"
MOMENTS = {
    "when built": (None, 1e9, 0),
    "in the first task": (2, 1e9, 0),
    "in a task": (5, 1e9, 3),
    "saved in a task": (5, 0.0, 5),
    "after a task": (6, 1e9, 6),
}
CASES = [(MIXED, moment) for moment in MOMENTS]
CASES += [
    (methods, moment)
    for methods in ("plain", "explicit-ewc", "si", "er", "a-gem", "explicit-mas,mas")
    for moment in ("in a task", "saved in a task")
]


@cache
def whole(methods: str) -> list[Result]:
    """What comes out where memory holds all."""
    with tempfile.TemporaryDirectory() as folder:
        return ran(Path(folder) / "whole.sqlite", runs_of(methods, 2))


def test_a_deterministic_fleet_is_not_split_and_one_line_says_what_to_give(tmp_path):
    Cramped.at, Cramped.most = 4, 3
    line = r"^4 runs of mlp do not fit into the memory of cpu, and a deterministic fleet is not split: give --fleet 2$"
    with pytest.raises(MooringError, match=line):
        ran(tmp_path / "study.sqlite", runs_of("plain"), deterministic=True)
    assert Cramped.sailed == [4]
    found = ran(tmp_path / "study.sqlite", runs_of("plain"), deterministic=True, fleet=2)
    assert Cramped.sailed == [4, 2, 2]  # from their beginning: their checkpoint is of four
    assert [result.status for result in found] == ["finished"] * 4
    assert Cramped.taken == 4 * 4 + 4 * STEPS


@pytest.mark.parametrize(("methods", "moment"), CASES)
def test_halves_go_on_from_the_last_checkpoint_and_give_what_the_whole_gives(tmp_path, methods, moment):
    at, every, back = MOMENTS[moment]  # when memory runs out, how often is saved, what has to be gone back to
    runs, expected = runs_of(methods, 2), whole(methods)
    Cramped.sailed, Cramped.taken, Cramped.at, Cramped.most = [], 0, at, (len(runs) + 1) // 2
    listening = Listening()
    near(ran(tmp_path / "halves.sqlite", runs, every=every, reporter=listening), expected)
    half = len(runs) // 2
    assert Cramped.sailed == ([half, half] if at is None else [len(runs), half, half])
    assert Cramped.taken == len(runs) * ((at or 0) + STEPS - back)  # and nothing twice that was saved
    assert listening.notes == [f"out of memory with {len(runs)} runs: going on with {half} at a time"]
    assert not (tmp_path / "halves.sqlite.fleets").exists()


def test_halves_halve_again_and_later_fleets_of_the_shape_are_as_small_from_the_start(tmp_path):
    runs = runs_of("plain", 16) + runs_of("joint", 8)
    expected = ran(tmp_path / "whole.sqlite", runs)
    Cramped.sailed, Cramped.most, Cramped.at = [], 2, 4
    listening = Listening()
    near(ran(tmp_path / "parts.sqlite", runs, fleet=8, reporter=listening), expected)
    plain = [8, 4, 2, 2, 2, 2, *[2] * 4]  # memory ran out twice, and not again for the second fleet
    assert Cramped.sailed == [*plain, 8, 4, 2, 2, 2, 2]  # another shape finds out for itself
    assert [note.removeprefix("out of memory with ") for note in listening.notes] == [
        "8 runs: going on with 4 at a time",
        "4 runs: going on with 2 at a time",
    ] * 2
    assert listening.ended == {0: 8, 1: 8, 2: 8}


def test_an_odd_number_of_runs_is_halved_too(tmp_path):
    runs = runs_of("si", 5)
    expected = ran(tmp_path / "whole.sqlite", runs)
    Cramped.sailed, Cramped.most, Cramped.at = [], 1, 3
    near(ran(tmp_path / "parts.sqlite", runs), expected)
    assert Cramped.sailed == [5, 3, 2, 1, 1, 1, 1, 1]


def test_one_run_that_does_not_fit_is_told_in_one_line_and_what_was_finished_is_kept(tmp_path):
    runs = runs_of("plain", 2) + runs_of("joint", 3)
    ran(tmp_path / "study.sqlite", runs[:2])
    Cramped.most, Cramped.at = 0, None
    with pytest.raises(MooringError) as caught:
        ran(tmp_path / "study.sqlite", runs)
    assert str(caught.value) == (
        "one run of mlp with batch=4 does not fit into the memory of cpu: give a smaller batch, or another device"
    )
    assert len(Study(tmp_path / "study.sqlite").results()) == 2


def test_an_error_that_is_not_about_memory_is_not_hidden(tmp_path, monkeypatch):
    def broken(self, *args):
        raise RuntimeError("shapes differ")

    monkeypatch.setattr(Cramped, "_step", broken)
    with pytest.raises(RuntimeError, match="shapes differ"):
        ran(tmp_path / "study.sqlite", runs_of("plain"))
    assert Cramped.sailed == [4]


# Runs that were lost before


@pytest.mark.parametrize("at", [2, 7])
def test_lost_runs_belong_to_the_half_that_has_them(tmp_path, at):
    runs = runs_of("plain,ewc")
    runs[1], runs[6] = replace(runs[1], lr=1e200), replace(runs[6], strength=1e200)
    expected = ran(tmp_path / "whole.sqlite", runs)
    assert [result.status for result in expected].count("unstable") == 2
    Cramped.most, Cramped.at = 4, at
    near(ran(tmp_path / "halves.sqlite", runs, every=0.0), expected)


def test_a_half_of_lost_runs_alone_has_its_results(tmp_path):
    runs = runs_of("plain,ewc", 2)
    runs[:2] = [replace(run, lr=1e200) for run in runs[:2]]
    expected = ran(tmp_path / "whole.sqlite", runs)
    assert [result.status for result in expected] == ["unstable"] * 2 + ["finished"] * 2
    Cramped.most, Cramped.at, Cramped.sailed = 1, 4, []
    listening = Listening()
    near(ran(tmp_path / "halves.sqlite", runs, every=0.0, reporter=listening), expected)
    assert Cramped.sailed == [4, 2, 1, 1]  # and none for the half that is lost
    assert listening.ended == {0: 4}


def test_rejected_runs_are_rejected_in_halves_too(tmp_path):
    runs = [replace(run, momentum=0.0, lr=0.01) for run in runs_of("ewc,balanced-ewc")]
    runs[3] = replace(runs[3], strength=1e12)
    expected = ran(tmp_path / "whole.sqlite", runs, reject=True)
    assert [result.status for result in expected].count("rejected") >= 1
    for at in (1, 4):
        Cramped.most, Cramped.at = 4, at
        near(ran(tmp_path / f"{at}.sqlite", runs, reject=True), expected)


# Killed and continued


class KilledError(BaseException):
    """As a kill: nobody tidies up."""


def killed_at(moment: int, monkeypatch) -> None:
    """From here on, something is killed before the so-manieth file is put in its place or deleted."""
    calls, unlink = count(), Path.unlink

    def watched(act):
        def acted(path, *args, **rest):
            scratch = act is unlink and path.name.startswith(".")
            if not scratch and next(calls) == moment:
                raise KilledError
            return act(path, *args, **rest)

        return acted

    monkeypatch.setattr("mooring.lab.model.atomic_files.os.replace", watched(os.replace))
    monkeypatch.setattr(Path, "unlink", watched(unlink))


@pytest.mark.faults
def test_killed_at_every_moment_around_a_split_nothing_is_lost_or_trained_twice(tmp_path, monkeypatch):
    runs = runs_of("si,plain", 2)
    expected = ran(tmp_path / "whole.sqlite", runs)
    whole_again = halves_again = 0
    for moment in range(100):
        Cramped.most, Cramped.at = len(runs) // 2, 4  # one step after the checkpoint of the first task
        path = tmp_path / f"{moment}.sqlite"
        with monkeypatch.context() as during:
            killed_at(moment, during)
            try:
                ran(path, runs)
                break
            except KilledError:
                Cramped.made = []  # the error, and what it holds, is not gone yet
        saved = CheckpointIndex(Path(f"{path}.fleets"), "cpu", reject=False).entries()
        left = {run.key for run in runs} - {result.spec.key for result in Study(path).results()}
        ahead = [STEPS - max((each.steps for each in saved if key in each.runs), default=0) for key in left]
        Cramped.taken, Cramped.sailed = 0, []
        near(ran(path, runs), expected)
        again = Cramped.sailed[:1] == [len(runs)]  # memory runs out once more, after one step
        whole_again, halves_again = whole_again + again, halves_again + (not again)
        assert Cramped.taken == sum(ahead) + len(runs) * again, f"killed at {moment}"
        assert not Path(f"{path}.fleets").exists()
    assert whole_again > 1
    assert halves_again > 3


def test_with_the_whole_and_its_halves_on_disk_each_run_goes_on_from_the_furthest(tmp_path, monkeypatch):
    runs, path = runs_of("si", 4), tmp_path / "study.sqlite"
    expected = ran(tmp_path / "whole.sqlite", runs)
    Cramped.most, Cramped.at = 2, 4
    with monkeypatch.context() as during:
        during.setattr(Path, "unlink", lambda *args, **rest: None)  # the whole stays, as after a power cut
        with monkeypatch.context() as at_first:
            at_first.setattr(runner.FleetRunner, "_run_part", once_then_stop(runner.FleetRunner._run_part))
            with pytest.raises(KilledError):
                ran(path, runs)
        with pytest.raises(InterruptedStudyError):
            ran(path, runs, reporter=Stopping(at=(0, 6)))
    found = CheckpointIndex(Path(f"{path}.fleets"), "cpu", reject=False).entries()
    assert [(saved.steps, len(saved.runs)) for saved in found] == [(6, 2), (3, 2), (3, 4)]
    Cramped.taken, Cramped.sailed = 0, []
    near(ran(path, runs), expected)
    assert Cramped.sailed == [2, 2]
    assert Cramped.taken == 2 * (STEPS - 6) + 2 * (STEPS - 3)
    assert not Path(f"{path}.fleets").exists()


def once_then_stop(act):
    calls = count()

    def acted(*args):
        if next(calls):
            raise KilledError
        return act(*args)

    return acted


class Stopping(SilentReporter):
    """Stops the n-th fleet when it is so many steps on its way."""

    def __init__(self, at: tuple[int, int]) -> None:
        self.at = at

    def advanced(self, number, fleet, done):
        if (number, fleet.steps) == self.at:
            raise InterruptedStudyError("stopped")


def test_asked_to_stop_in_a_half_it_saves_and_goes_on_in_halves(tmp_path):
    runs, path = runs_of("plain,si", 2), tmp_path / "study.sqlite"
    expected = ran(tmp_path / "whole.sqlite", runs)
    Cramped.most, Cramped.at = 2, 4
    with pytest.raises(InterruptedStudyError):
        ran(path, runs, reporter=Stopping(at=(0, 6)))
    found = CheckpointIndex(Path(f"{path}.fleets"), "cpu", reject=False).entries()
    assert [(saved.steps, len(saved.runs)) for saved in found] == [(6, 2), (3, 2)]  # the whole one is gone
    Cramped.sailed, Cramped.taken = [], 0
    near(ran(path, runs), expected)
    assert Cramped.sailed == [2, 2]
    assert Cramped.taken == 2 * (STEPS - 6) + 2 * (STEPS - 3)


def test_some_of_the_runs_of_an_interrupted_fleet_go_on_from_it_and_the_others_later(tmp_path):
    runs, path = runs_of("plain,si", 2), tmp_path / "study.sqlite"
    expected = ran(tmp_path / "whole.sqlite", runs)
    with pytest.raises(InterruptedStudyError):
        ran(path, runs, reporter=Stopping(at=(0, 3)))
    for some in (runs[1:3], runs):
        Cramped.taken = 0
        near(ran(path, some), [result for result in expected if result.spec in some])
        assert Cramped.taken == 2 * (STEPS - 3)
    assert not Path(f"{path}.fleets").exists()


# Told as it goes


@pytest.mark.parametrize("every", [0.0, 1e9], ids=["saved often", "saved after tasks"])
def test_what_is_done_counts_all_parts_goes_back_once_and_ends_at_the_whole(tmp_path, monkeypatch, every):
    monkeypatch.setattr(runner, "REPORT_SECONDS", 0.0)
    runs = runs_of("plain,si")
    Cramped.most, Cramped.at = 4, 5
    listening = Listening()
    ran(tmp_path / "study.sqlite", runs, every=every, reporter=listening)
    done, saved = listening.done[0], 5 if every == 0 else 3
    assert listening.work == [8 * STEPS]
    assert listening.ended == {0: 8}
    assert max(done) == done[-1] == 8 * STEPS
    back = [later for before, later in pairwise(done) if later < before]
    assert back == ([] if every == 0 else [8 * saved + 4])  # one step of a half after the checkpoint
    assert 4 * STEPS + 4 * saved in done  # one half is through, the other where it was saved


def test_the_bars_and_the_lines_of_a_fleet_in_halves_end_where_they_should(tmp_path):
    runs = runs_of("plain,si") + runs_of("joint")
    Cramped.most, Cramped.at = 4, 5
    bars = BarReporter(Console(file=io.StringIO(), force_terminal=True))
    ran(tmp_path / "bars.sqlite", runs, reporter=bars)
    study = bars.bars.tasks[bars.study]
    assert (study.completed, study.total) == (12 * STEPS, 12 * STEPS)
    told = io.StringIO()
    ran(tmp_path / "lines.sqlite", runs, reporter=LineReporter(told))
    lines = told.getvalue().splitlines()
    assert lines[0] == "12 runs to train in 2 fleets"
    assert [line for line in lines if "done" in line and "tasks" not in line] == [
        "fleet 1 of 2: done",
        "fleet 2 of 2: done",
    ]
    assert "note: out of memory with 8 runs: going on with 4 at a time" in lines
