"""A fleet that does not fit into memory continues in halves from its last checkpoint, with the same results."""

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

from laboratory.small import class_stream, spec_for
from mooring.errors import MooringError
from mooring_lab.cli.study_progress import BarReporter, LineReporter
from mooring_lab.engines import runner
from mooring_lab.engines.checkpoint_index import CheckpointIndex
from mooring_lab.engines.runner import SilentReporter
from mooring_lab.engines.signals import InterruptedStudyError
from mooring_lab.fleet.fleet import Fleet
from mooring_lab.model.results import Result
from mooring_lab.model.spec import RunSpec
from mooring_lab.study.study import Study

STREAM = class_stream(tasks=3, images=12)
STEPS = 9  # of a run: three tasks of three steps
STREAMS = {STREAM.fingerprint: STREAM}


class CrampedFleet(Fleet):
    """A fleet on a device that holds `most` runs: more fail in step `at`, or, where that is None, at once."""

    most: int
    at: int | None
    created: list["weakref.ref[object]"]
    sizes: list[int]
    taken: int

    def __init__(self, specs, *args, **more) -> None:
        assert [reference for reference in CrampedFleet.created if reference() is not None] == [], (
            "another fleet is still in memory"
        )
        super().__init__(specs, *args, **more)
        CrampedFleet.created.append(weakref.ref(self))
        if CrampedFleet.at is None and len(specs) > CrampedFleet.most:
            self.no_room()

    def no_room(self):
        CrampedFleet.created.append(weakref.ref(self.stack))  # what takes the memory; it holds itself
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    def run(self, callback=None):
        CrampedFleet.sizes.append(len(self.specs))
        return super().run(callback)

    def _step(self, *args):
        if CrampedFleet.at is not None and self.steps >= CrampedFleet.at and len(self.specs) > CrampedFleet.most:
            self.no_room()
        CrampedFleet.taken += len(self.specs)
        super()._step(*args)


@pytest.fixture(autouse=True)
def _cramped(monkeypatch):
    CrampedFleet.most, CrampedFleet.at, CrampedFleet.taken = 10**6, 0, 0
    CrampedFleet.created, CrampedFleet.sizes = [], []
    monkeypatch.setattr(runner, "Fleet", CrampedFleet)


def runs_of(methods: str, seeds: int = 4, **more) -> list[RunSpec]:
    options = {"batch": 4, "epochs": 1, **more}
    return [spec_for(method, STREAM, seed, **options) for method in methods.split(",") for seed in range(seeds)]


class RecordingReporter(SilentReporter):
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


def run_study(path: Path, runs: list[RunSpec], *, reject: bool = False, **how) -> list[Result]:
    return Study(path, **how).run(runs, STREAMS, reject=reject)


def check_close(results: list[Result], expected: list[Result]) -> None:
    """The same runs with the same results, to nine digits."""
    assert len(results) == len(expected)
    for one, other in zip(results, expected, strict=True):
        assert (one.spec, one.status, one.reason, one.steps) == (other.spec, other.status, other.reason, other.steps)
        assert (one.untrained, one.matrix) == (other.untrained, other.matrix)
        for ours, theirs in zip(numbers(one), numbers(other), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def numbers(result: Result) -> list[torch.Tensor]:
    series = (result.losses, *(list(values.values()) for values in (result.drift, result.cka, result.importance)))
    return [torch.tensor(values, dtype=torch.float64) for values in series]


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
        return run_study(Path(folder) / "whole.sqlite", runs_of(methods, 2))


def test_deterministic_fleet_is_not_split_and_one_line_says_what_to_give(tmp_path):
    CrampedFleet.at, CrampedFleet.most = 4, 3
    line = r"^4 runs of mlp do not fit into the memory of cpu, and a deterministic fleet is not split: give --fleet 2$"
    with pytest.raises(MooringError, match=line):
        run_study(tmp_path / "study.sqlite", runs_of("plain"), deterministic=True)
    assert CrampedFleet.sizes == [4]
    results = run_study(tmp_path / "study.sqlite", runs_of("plain"), deterministic=True, fleet=2)
    assert CrampedFleet.sizes == [4, 2, 2]  # from their beginning: their checkpoint is of four
    assert [result.status for result in results] == ["finished"] * 4
    assert CrampedFleet.taken == 4 * 4 + 4 * STEPS


@pytest.mark.parametrize(("methods", "moment"), CASES)
def test_halves_continue_from_the_last_checkpoint_and_equal_the_whole(tmp_path, methods, moment):
    at, every, back = MOMENTS[moment]  # when memory runs out, how often is saved, what has to be gone back to
    runs, expected = runs_of(methods, 2), whole(methods)
    CrampedFleet.sizes, CrampedFleet.taken, CrampedFleet.at, CrampedFleet.most = [], 0, at, (len(runs) + 1) // 2
    reporter = RecordingReporter()
    check_close(run_study(tmp_path / "halves.sqlite", runs, every=every, reporter=reporter), expected)
    half = len(runs) // 2
    assert CrampedFleet.sizes == ([half, half] if at is None else [len(runs), half, half])
    assert CrampedFleet.taken == len(runs) * ((at or 0) + STEPS - back)  # and nothing twice that was saved
    assert reporter.notes == [f"out of memory with {len(runs)} runs: going on with {half} at a time"]
    assert not (tmp_path / "halves.sqlite.fleets").exists()


def test_halves_are_halved_again_and_later_fleets_start_as_small(tmp_path):
    runs = runs_of("plain", 16) + runs_of("joint", 8)
    expected = run_study(tmp_path / "whole.sqlite", runs)
    CrampedFleet.sizes, CrampedFleet.most, CrampedFleet.at = [], 2, 4
    reporter = RecordingReporter()
    check_close(run_study(tmp_path / "parts.sqlite", runs, fleet=8, reporter=reporter), expected)
    plain = [8, 4, 2, 2, 2, 2, *[2] * 4]  # memory ran out twice, and not again for the second fleet
    assert CrampedFleet.sizes == [*plain, 8, 4, 2, 2, 2, 2]  # another shape finds out for itself
    assert [note.removeprefix("out of memory with ") for note in reporter.notes] == [
        "8 runs: going on with 4 at a time",
        "4 runs: going on with 2 at a time",
    ] * 2
    assert reporter.ended == {0: 8, 1: 8, 2: 8}


def test_odd_number_of_runs_is_halved_too(tmp_path):
    runs = runs_of("si", 5)
    expected = run_study(tmp_path / "whole.sqlite", runs)
    CrampedFleet.sizes, CrampedFleet.most, CrampedFleet.at = [], 1, 3
    check_close(run_study(tmp_path / "parts.sqlite", runs), expected)
    assert CrampedFleet.sizes == [5, 3, 2, 1, 1, 1, 1, 1]


def test_one_run_that_does_not_fit_is_reported_in_one_line_and_what_was_finished_is_kept(tmp_path):
    runs = runs_of("plain", 2) + runs_of("joint", 3)
    run_study(tmp_path / "study.sqlite", runs[:2])
    CrampedFleet.most, CrampedFleet.at = 0, None
    with pytest.raises(MooringError) as caught:
        run_study(tmp_path / "study.sqlite", runs)
    assert str(caught.value) == (
        "one run of mlp with batch=4 does not fit into the memory of cpu: give a smaller batch, or another device"
    )
    assert len(Study(tmp_path / "study.sqlite").results()) == 2


def test_error_that_is_not_about_memory_is_not_hidden(tmp_path, monkeypatch):
    def broken(self, *args):
        raise RuntimeError("shapes differ")

    monkeypatch.setattr(CrampedFleet, "_step", broken)
    with pytest.raises(RuntimeError, match="shapes differ"):
        run_study(tmp_path / "study.sqlite", runs_of("plain"))
    assert CrampedFleet.sizes == [4]


# Runs that were lost before


@pytest.mark.parametrize("at", [2, 7])
def test_lost_runs_belong_to_the_half_that_has_them(tmp_path, at):
    runs = runs_of("plain,ewc")
    runs[1], runs[6] = replace(runs[1], lr=1e200), replace(runs[6], strength=1e200)
    expected = run_study(tmp_path / "whole.sqlite", runs)
    assert [result.status for result in expected].count("unstable") == 2
    CrampedFleet.most, CrampedFleet.at = 4, at
    check_close(run_study(tmp_path / "halves.sqlite", runs, every=0.0), expected)


def test_half_of_lost_runs_alone_has_its_results(tmp_path):
    runs = runs_of("plain,ewc", 2)
    runs[:2] = [replace(run, lr=1e200) for run in runs[:2]]
    expected = run_study(tmp_path / "whole.sqlite", runs)
    assert [result.status for result in expected] == ["unstable"] * 2 + ["finished"] * 2
    CrampedFleet.most, CrampedFleet.at, CrampedFleet.sizes = 1, 4, []
    reporter = RecordingReporter()
    check_close(run_study(tmp_path / "halves.sqlite", runs, every=0.0, reporter=reporter), expected)
    assert CrampedFleet.sizes == [4, 2, 1, 1]  # and none for the half that is lost
    assert reporter.ended == {0: 4}


def test_rejected_runs_are_rejected_in_halves_too(tmp_path):
    runs = [replace(run, momentum=0.0, lr=0.01) for run in runs_of("ewc,balanced-ewc")]
    runs[3] = replace(runs[3], strength=1e12)
    expected = run_study(tmp_path / "whole.sqlite", runs, reject=True)
    assert [result.status for result in expected].count("rejected") >= 1
    for at in (1, 4):
        CrampedFleet.most, CrampedFleet.at = 4, at
        check_close(run_study(tmp_path / f"{at}.sqlite", runs, reject=True), expected)


# Killed and continued


class KilledError(BaseException):
    """As a kill: nobody tidies up."""


def killed_at(moment: int, monkeypatch) -> None:
    """From here on, something is killed before the so-manieth file is put in its place or deleted."""
    calls, unlink = count(), Path.unlink

    def watched(act):
        def acted(path, *args, **more):
            scratch = act is unlink and path.name.startswith(".")
            if not scratch and next(calls) == moment:
                raise KilledError
            return act(path, *args, **more)

        return acted

    monkeypatch.setattr("mooring_lab.model.atomic_files.os.replace", watched(os.replace))
    monkeypatch.setattr(Path, "unlink", watched(unlink))


@pytest.mark.faults
def test_killed_at_every_moment_around_a_split_nothing_is_lost_or_trained_twice(tmp_path, monkeypatch):
    runs = runs_of("si,plain", 2)
    expected = run_study(tmp_path / "whole.sqlite", runs)
    whole_again = halves_again = 0
    for moment in range(100):
        CrampedFleet.most, CrampedFleet.at = len(runs) // 2, 4  # one step after the checkpoint of the first task
        path = tmp_path / f"{moment}.sqlite"
        with monkeypatch.context() as during:
            killed_at(moment, during)
            try:
                run_study(path, runs)
                break
            except KilledError:
                CrampedFleet.created = []  # the error, and what it holds, is not gone yet
        saved = CheckpointIndex(Path(f"{path}.fleets"), "cpu", reject=False).entries()
        left = {run.key for run in runs} - {result.spec.key for result in Study(path).results()}
        ahead = [STEPS - max((entry.steps for entry in saved if key in entry.runs), default=0) for key in left]
        CrampedFleet.taken, CrampedFleet.sizes = 0, []
        check_close(run_study(path, runs), expected)
        again = CrampedFleet.sizes[:1] == [len(runs)]  # memory runs out once more, after one step
        whole_again, halves_again = whole_again + again, halves_again + (not again)
        assert CrampedFleet.taken == sum(ahead) + len(runs) * again, f"killed at {moment}"
        assert not Path(f"{path}.fleets").exists()
    assert whole_again > 1
    assert halves_again > 3


def test_with_the_whole_and_its_halves_on_disk_each_run_goes_on_from_the_furthest(tmp_path, monkeypatch):
    runs, path = runs_of("si", 4), tmp_path / "study.sqlite"
    expected = run_study(tmp_path / "whole.sqlite", runs)
    CrampedFleet.most, CrampedFleet.at = 2, 4
    with monkeypatch.context() as during:
        during.setattr(Path, "unlink", lambda *args, **more: None)  # the whole stays, as after a power cut
        with monkeypatch.context() as at_first:
            at_first.setattr(runner.FleetRunner, "_run_part", once_then_stop(runner.FleetRunner._run_part))
            with pytest.raises(KilledError):
                run_study(path, runs)
        with pytest.raises(InterruptedStudyError):
            run_study(path, runs, reporter=StoppingReporter(at=(0, 6)))
    entries = CheckpointIndex(Path(f"{path}.fleets"), "cpu", reject=False).entries()
    assert [(saved.steps, len(saved.runs)) for saved in entries] == [(6, 2), (3, 2), (3, 4)]
    CrampedFleet.taken, CrampedFleet.sizes = 0, []
    check_close(run_study(path, runs), expected)
    assert CrampedFleet.sizes == [2, 2]
    assert CrampedFleet.taken == 2 * (STEPS - 6) + 2 * (STEPS - 3)
    assert not Path(f"{path}.fleets").exists()


def once_then_stop(act):
    calls = count()

    def acted(*args):
        if next(calls):
            raise KilledError
        return act(*args)

    return acted


class StoppingReporter(SilentReporter):
    """Stops the n-th fleet when it is so many steps on its way."""

    def __init__(self, at: tuple[int, int]) -> None:
        self.at = at

    def advanced(self, number, fleet, done):
        if (number, fleet.steps) == self.at:
            raise InterruptedStudyError("stopped")


def test_asked_to_stop_in_a_half_it_saves_and_goes_on_in_halves(tmp_path):
    runs, path = runs_of("plain,si", 2), tmp_path / "study.sqlite"
    expected = run_study(tmp_path / "whole.sqlite", runs)
    CrampedFleet.most, CrampedFleet.at = 2, 4
    with pytest.raises(InterruptedStudyError):
        run_study(path, runs, reporter=StoppingReporter(at=(0, 6)))
    entries = CheckpointIndex(Path(f"{path}.fleets"), "cpu", reject=False).entries()
    assert [(saved.steps, len(saved.runs)) for saved in entries] == [(6, 2), (3, 2)]  # the whole one is gone
    CrampedFleet.sizes, CrampedFleet.taken = [], 0
    check_close(run_study(path, runs), expected)
    assert CrampedFleet.sizes == [2, 2]
    assert CrampedFleet.taken == 2 * (STEPS - 6) + 2 * (STEPS - 3)


def test_some_of_the_runs_of_an_interrupted_fleet_go_on_from_it_and_the_others_later(tmp_path):
    runs, path = runs_of("plain,si", 2), tmp_path / "study.sqlite"
    expected = run_study(tmp_path / "whole.sqlite", runs)
    with pytest.raises(InterruptedStudyError):
        run_study(path, runs, reporter=StoppingReporter(at=(0, 3)))
    for subset in (runs[1:3], runs):
        CrampedFleet.taken = 0
        check_close(run_study(path, subset), [result for result in expected if result.spec in subset])
        assert CrampedFleet.taken == 2 * (STEPS - 3)
    assert not Path(f"{path}.fleets").exists()


# Told as it goes


@pytest.mark.parametrize("every", [0.0, 1e9], ids=["saved often", "saved after tasks"])
def test_progress_counts_all_parts_decreases_once_and_ends_at_the_total(tmp_path, monkeypatch, every):
    monkeypatch.setattr(runner, "REPORT_SECONDS", 0.0)
    runs = runs_of("plain,si")
    CrampedFleet.most, CrampedFleet.at = 4, 5
    reporter = RecordingReporter()
    run_study(tmp_path / "study.sqlite", runs, every=every, reporter=reporter)
    done, saved = reporter.done[0], 5 if every == 0 else 3
    assert reporter.work == [8 * STEPS]
    assert reporter.ended == {0: 8}
    assert max(done) == done[-1] == 8 * STEPS
    back = [later for before, later in pairwise(done) if later < before]
    assert back == ([] if every == 0 else [8 * saved + 4])  # one step of a half after the checkpoint
    assert 4 * STEPS + 4 * saved in done  # one half is through, the other where it was saved


def test_bars_and_lines_of_a_split_fleet_end_at_the_total(tmp_path):
    runs = runs_of("plain,si") + runs_of("joint")
    CrampedFleet.most, CrampedFleet.at = 4, 5
    bars = BarReporter(Console(file=io.StringIO(), force_terminal=True))
    run_study(tmp_path / "bars.sqlite", runs, reporter=bars)
    study = bars.bars.tasks[bars.study]
    assert (study.completed, study.total) == (12 * STEPS, 12 * STEPS)
    output = io.StringIO()
    run_study(tmp_path / "lines.sqlite", runs, reporter=LineReporter(output))
    lines = output.getvalue().splitlines()
    assert lines[0] == "12 runs to train in 2 fleets"
    assert [line for line in lines if "done" in line and "tasks" not in line] == [
        "fleet 1 of 2: done",
        "fleet 2 of 2: done",
    ]
    assert "note: out of memory with 8 runs: going on with 4 at a time" in lines
