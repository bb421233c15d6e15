"""A study trains the runs that have no result and no others, in whatever order they are asked for."""

import json
import time
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from laboratory.small import class_stream
from mooring.errors import MooringError
from mooring_lab.engines import runner
from mooring_lab.engines.runner import SilentReporter
from mooring_lab.engines.signals import InterruptedStudyError
from mooring_lab.fleet.fleet import Fleet
from mooring_lab.model.results import Result
from mooring_lab.streams import Split, Stream, Task
from mooring_lab.streams.options import StreamOptions, open_stream
from mooring_lab.study.study import Study

STREAM = open_stream(StreamOptions("digits", tasks=2, limit=20))
ALLOWED_SAVE_SECONDS = runner.ALLOWED_SAVE_SECONDS  # which other tests change
SETTINGS = {"stream": STREAM, "network": "mlp", "batch": 10, "epochs": 1, "dtype": "float64", "lr": 0.05}


class Counted(Fleet):
    """A fleet that writes down whom it trained."""

    fleets: list[list[tuple[str, int]]]
    steps_taken: int

    def run(self, callback=None):
        Counted.fleets.append([(spec.method, spec.seed) for spec in self.specs])
        return super().run(callback)

    def _step(self, *args):
        Counted.steps_taken += len(self.specs)
        super()._step(*args)


@pytest.fixture(autouse=True)
def _counted(monkeypatch):
    Counted.fleets, Counted.steps_taken = [], 0
    monkeypatch.setattr(runner, "Fleet", Counted)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "study.sqlite"


def newly_trained() -> list[tuple[str, int]]:
    """Who was trained since the last call."""
    runs = sorted(run for fleet in Counted.fleets for run in fleet)
    Counted.fleets = []
    return runs


def comparable(results) -> dict[str, str]:
    """All there is to know of each run but how long it took."""
    return {result.spec.key: repr(replace(result, seconds=0.0)) for result in results}


class InterruptingReporter(SilentReporter):
    """Stops at a fleet's first task, as a kill would: after the checkpoint."""

    def __init__(self, fleet: int = 0) -> None:
        self.fleet = fleet

    def advanced(self, number, fleet, done):
        if number == self.fleet and fleet.position.task == 1:
            raise InterruptedStudyError("stopped")


def interrupted(path, *, at: int = 0, **asked) -> Study:
    """A study whose fleet was stopped after its first task."""
    study = Study(path, reporter=InterruptingReporter(at))
    with pytest.raises(InterruptedStudyError):
        study.compare(**{**SETTINGS, **asked})
    assert len(list(study.checkpoints.glob("*.safetensors"))) == 1
    newly_trained()
    return study


# Nothing is trained twice


def test_misspelled_argument_is_refused_with_a_suggestion(tmp_path):
    with pytest.raises(MooringError, match=r"unknown setting 'seed' \(did you mean 'seeds'\?\)"):
        Study(tmp_path / "study.sqlite").compare(stream="digits", seed=2)


def test_asking_again_trains_nothing_and_returns_the_same(path):
    first = Study(path).compare(methods="plain,ewc", seeds=2, **SETTINGS)
    assert newly_trained() == [("ewc", 0), ("ewc", 1), ("plain", 0), ("plain", 1)]
    assert Study(path).compare(methods="plain,ewc", seeds=2, **SETTINGS) == first
    assert newly_trained() == []


def test_adding_a_seed_trains_that_seed(path):
    Study(path).compare(methods="plain,explicit-mas", seeds=[0, 1], **SETTINGS)
    newly_trained()
    rows = Study(path).compare(methods="plain,explicit-mas", seeds=3, **SETTINGS)
    assert newly_trained() == [("explicit-mas", 2), ("plain", 2)]
    assert [len(row.results) for row in rows] == [3, 3]


def test_adding_a_method_trains_that_method(path):
    Study(path).compare(methods="plain", seeds=2, **SETTINGS)
    newly_trained()
    Study(path).compare(methods="plain,er", seeds=2, memory=10, **SETTINGS)
    assert newly_trained() == [("er", 0), ("er", 1)]


def test_adding_a_strength_trains_that_strength(path):
    Study(path).compare(methods="ewc", seeds=1, strength=[1.0], **SETTINGS)
    newly_trained()
    rows = Study(path).compare(methods="ewc", seeds=1, strength=[1.0, 10.0], **SETTINGS)
    assert newly_trained() == [("ewc", 0)]
    assert [row.label for row in rows] == ["ewc 1", "ewc 10"]


def test_run_asked_for_twice_at_once_is_trained_once(path):
    Study(path).compare(methods=["plain", "plain"], seeds=[0, 0], **{**SETTINGS, "lr": [0.1, 0.1]})
    assert newly_trained() == [("plain", 0)]


def test_setting_that_changes_the_result_is_another_run(path):
    Study(path).compare(methods="plain", seeds=1, **SETTINGS)
    newly_trained()
    for changed in (
        {"lr": 0.04},
        {"batch": 5},
        {"epochs": 2},
        {"momentum": 0.5},
        {"weight_decay": 0.1},
        {"heads": "fresh"},
        {"dtype": "float32"},
        {"stream": class_stream(2, 20)},
    ):
        Study(path).compare(methods="plain", seeds=1, **{**SETTINGS, **changed})
        assert newly_trained() == [("plain", 0)], changed


def test_stream_of_another_name_with_the_same_images_is_the_same_stream(path):
    Study(path).compare(methods="plain", seeds=1, **SETTINGS)
    newly_trained()
    Study(path).compare(methods="plain", seeds=1, **{**SETTINGS, "stream": replace(STREAM, name="my own")})
    assert newly_trained() == []


def test_whole_numbers_and_decimal_ones_are_the_same_run(path):
    Study(path).compare(methods="ewc", seeds=1, strength=10, **{**SETTINGS, "lr": 1, "momentum": 0, "weight_decay": 0})
    newly_trained()
    Study(path).compare(
        methods="ewc", seeds=1, strength=10.0, **{**SETTINGS, "lr": 1.0, "momentum": 0.0, "weight_decay": 0.0}
    )
    assert newly_trained() == []


def test_results_are_equal_whichever_order_they_are_asked_in(tmp_path):
    one, other = Study(tmp_path / "one.sqlite"), Study(tmp_path / "other.sqlite")
    one.compare(methods="plain,ewc,explicit-si", seeds=3, **SETTINGS)
    for methods, seeds in (("explicit-si", [2]), ("plain,explicit-si", [1, 0]), ("ewc,explicit-si,plain", [0, 1, 2])):
        other.compare(methods=methods, seeds=seeds, **SETTINGS)
    first, second = ({result.spec.key: result for result in study.results()} for study in (one, other))
    assert first.keys() == second.keys()
    for key, result in first.items():
        close(result, second[key])


def close(one: Result, other: Result) -> None:
    assert (one.spec, one.status, one.reason, one.steps) == (other.spec, other.status, other.reason, other.steps)
    assert (one.matrix, one.untrained) == (other.matrix, other.untrained)
    for ours, theirs in ((one.losses, other.losses), (one.drift, other.drift), (one.importance, other.importance)):
        numbers = [
            torch.tensor(list(t.values()) if isinstance(t, dict) else t, dtype=torch.float64) for t in (ours, theirs)
        ]
        torch.testing.assert_close(*numbers, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("size", [1, 2])
def test_fleets_are_no_larger_than_asked_for_and_give_the_same(tmp_path, size):
    arguments = {**SETTINGS, "methods": "plain,ewc,si", "seeds": 1}
    Study(tmp_path / "all.sqlite").compare(**arguments)
    assert [len(fleet) for fleet in Counted.fleets] == [3]
    Counted.fleets = []
    Study(tmp_path / "few.sqlite", fleet=size).compare(**arguments)
    assert [len(fleet) for fleet in Counted.fleets] == ([1, 1, 1] if size == 1 else [2, 1])
    together, apart = (
        {result.spec.key: result for result in Study(tmp_path / name).results()}
        for name in ("all.sqlite", "few.sqlite")
    )
    assert together.keys() == apart.keys()
    for key, result in together.items():
        close(result, apart[key])


# Rejection


def too_strong(study: Study, reject: bool) -> Result:
    from mooring_lab.study.comparison import comparison

    asked = comparison(methods="ewc", seeds=1, strength=1e7, **{**SETTINGS, "momentum": 0.0, "lr": 0.01})
    specs = asked.specs(asked.streams[0][1], STREAM.name, STREAM.fingerprint, "")
    (result,) = study.run(specs, {STREAM.fingerprint: STREAM}, reject=reject)
    return result


def test_rejected_run_is_trained_when_asked_for_without_rejection(path):
    rejected = too_strong(Study(path), reject=True)
    assert rejected.status == "rejected"
    assert rejected.reason.startswith("after 1 task lr * strength * importance leaves (0, 1) in ")
    assert Counted.steps_taken == rejected.steps == 2
    newly_trained()
    assert too_strong(Study(path), reject=True) == rejected
    assert newly_trained() == []
    trained = too_strong(Study(path), reject=False)
    assert trained.status in ("finished", "unstable")
    assert trained.steps > rejected.steps
    assert newly_trained() == [("ewc", 0)]


def test_run_trained_without_rejection_need_not_be_trained_to_be_rejected(path, tmp_path):
    trained = too_strong(Study(path), reject=False)
    newly_trained()
    again = too_strong(Study(path), reject=True)
    assert newly_trained() == []
    assert (again.status, again.reason) == ("rejected", too_strong(Study(tmp_path / "new"), reject=True).reason)
    assert too_strong(Study(path), reject=False) == trained


# Interrupted


@pytest.mark.parametrize(
    "methods", ["plain,ewc", "frozen-after-first", "joint", "explicit-mas,mas", "si,rwalk,random", "er", "a-gem"]
)
def test_interrupted_fleet_continues_where_it_was_and_gives_the_same_bit_for_bit(path, tmp_path, methods):
    asked = {**SETTINGS, "methods": methods, "seeds": 2, "memory": 10, "epochs": 6}
    study = interrupted(path, **asked)
    runs, before = 2 * len(methods.split(",")), Counted.steps_taken
    Study(path).compare(**asked)
    assert before == runs * 2 * 6
    assert Counted.steps_taken == 2 * before
    assert list(study.checkpoints.glob("*")) == []
    whole = Study(tmp_path / "whole.sqlite")
    whole.compare(**asked)
    assert comparable(Study(path).results()) == comparable(whole.results())


class FakeClock:
    """A clock that stands still, except while a checkpoint is written or a task ends."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


def use_clock(monkeypatch, clock: FakeClock, save, fleet: type[Fleet]) -> None:
    """Train a kind of fleet by another clock, and save it by another function."""
    monkeypatch.setattr(runner, "ALLOWED_SAVE_SECONDS", ALLOWED_SAVE_SECONDS)
    monkeypatch.setattr(runner, "time", clock)
    monkeypatch.setattr(runner.checkpoint, "save", save)
    monkeypatch.setattr(runner, "Fleet", fleet)


@pytest.mark.parametrize(
    ("save_seconds", "task_seconds", "saved_after"),
    [(0.009, 0.1, [1, 2, 3]), (0.1, 1.0, [1]), (0.5, 30.0, [1, 2, 3]), (2.0, 60.0, [1, 3])],
    ids=["cheap", "expensive", "cheap beside its task", "cheap beside two tasks"],
)
def test_checkpoints_after_tasks_take_a_small_share_of_the_time(
    path, monkeypatch, save_seconds, task_seconds, saved_after
):
    clock, saved = FakeClock(), []

    def save(fleet, path):
        clock.now += save_seconds
        saved.append(fleet.position.task)

    class Slow(Fleet):
        def _end_task(self, *args):
            clock.now += task_seconds
            super()._end_task(*args)

    use_clock(monkeypatch, clock, save, Slow)
    stream = open_stream(StreamOptions("digits", tasks=4, limit=20))
    Study(path, every=1e9).compare(methods="plain", seeds=1, **{**SETTINGS, "stream": stream})
    assert saved == saved_after


def test_checkpoints_within_a_task_take_a_small_share_of_the_time(path, monkeypatch):
    clock, saved = FakeClock(), []

    def save(fleet, path):
        clock.now += 4.0
        saved.append(fleet.steps)

    class Slow(Fleet):
        def _step(self, *args):
            clock.now += 50.0
            super()._step(*args)

    use_clock(monkeypatch, clock, save, Slow)
    stream = open_stream(StreamOptions("digits", tasks=1, limit=100))
    Study(path, every=60.0).compare(methods="plain", seeds=1, **{**SETTINGS, "stream": stream})
    assert saved == [2, 6, 10]  # 4 s are 2 % of four steps; the first save is taken to be faster than it is


def test_interrupted_fleet_continues_as_it_was_when_more_is_asked_for(path):
    interrupted(path, methods="plain,ewc", seeds=2)
    Counted.steps_taken = 0
    Study(path).compare(methods="plain,explicit-mas,ewc,si", seeds=3, **SETTINGS)
    fleets = [sorted(fleet) for fleet in Counted.fleets]
    assert fleets[0] == [("ewc", 0), ("ewc", 1), ("plain", 0), ("plain", 1)]
    assert sorted(run for fleet in fleets for run in fleet) == sorted(
        (method, seed) for method in ("plain", "explicit-mas", "ewc", "si") for seed in range(3)
    )
    assert Counted.steps_taken == 4 * 2 + 8 * 4


def test_interrupted_fleet_continues_as_it_was_with_another_fleet_size(path):
    interrupted(path, methods="plain,ewc", seeds=2)
    Study(path, fleet=1).compare(methods="plain,ewc", seeds=2, **SETTINGS)
    assert [len(fleet) for fleet in Counted.fleets] == [4]


def test_what_was_finished_before_an_interruption_is_kept(path):
    study = interrupted(path, at=1, methods="plain,joint", seeds=2)
    assert [result.spec.method for result in study.results()] == ["plain", "plain"]
    Study(path).compare(methods="plain,joint", seeds=2, **SETTINGS)
    assert newly_trained() == [("joint", 0), ("joint", 1)]


# Damage


def rewritten(path, change) -> None:
    """The same checkpoint with another header."""
    with safe_open(path, framework="pt") as opened:
        header = json.loads(opened.metadata()["mooring"])
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    text = change(header, tensors)
    save_file(tensors, path, metadata={"mooring": text if isinstance(text, str) else json.dumps(header)})


def without(name: str):
    return lambda path: rewritten(path, lambda header, tensors: header.pop(name) and None)


DAMAGES = {
    "empty": lambda path: path.write_bytes(b""),
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "garbage": lambda path: path.write_bytes(b"\xff" * 5000),
    "no header": lambda path: save_file({"first_bad": torch.zeros(1)}, path),
    "a header that is not JSON": lambda path: rewritten(path, lambda header, tensors: "{"),
    "a header without strength groups": without("strength_groups"),
    "a header without groups": without("groups"),
    "a header without runs": without("runs"),
    "of other runs": lambda path: rewritten(path, lambda header, tensors: header.update(runs=["0" * 32])),
    "a missing tensor": lambda path: rewritten(path, lambda header, tensors: tensors.__delitem__("first_bad")),
    "missing parameters": lambda path: rewritten(
        path,
        lambda header, tensors: [tensors.pop(name) for name in list(tensors) if name.startswith("parameter/")] and None,
    ),
}


class NotingReporter(SilentReporter):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, line: str) -> None:
        self.notes.append(line)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint_is_noted_and_its_runs_start_again(path, tmp_path, damage):
    asked = {**SETTINGS, "methods": "ewc", "seeds": 1}
    study = interrupted(path, **asked)
    (checkpoint,) = study.checkpoints.glob("*.safetensors")
    DAMAGES[damage](checkpoint)
    reporter = NotingReporter()
    Study(path, reporter=reporter).compare(**asked)
    assert reporter.notes, "nothing was said"
    assert all(str(checkpoint) in note and "start again" in note and "\n" not in note for note in reporter.notes)
    assert not checkpoint.exists()
    whole = Study(tmp_path / "whole.sqlite")
    whole.compare(**asked)
    assert comparable(Study(path).results()) == comparable(whole.results())


@pytest.mark.parametrize("version", [1, 99])
def test_checkpoint_of_another_version_is_refused_in_one_line_and_left_as_it_is(path, version):
    asked = {**SETTINGS, "methods": "ewc", "seeds": 1}
    study = interrupted(path, **asked)
    (checkpoint,) = study.checkpoints.glob("*.safetensors")
    rewritten(checkpoint, lambda header, tensors: header.update(version=version))
    before = checkpoint.read_bytes()
    with pytest.raises(MooringError) as caught:
        Study(path).compare(**asked)
    assert str(caught.value) == (
        f"the checkpoint {checkpoint} has version {version}, this Mooring reads 3: "
        "continue it with the Mooring that wrote it, or delete it"
    )
    assert checkpoint.read_bytes() == before


def test_unreadable_checkpoint_is_noted_and_does_not_stop_the_study(path):
    study = Study(path, reporter=NotingReporter())
    study.checkpoints.mkdir()
    (study.checkpoints / "orphan.safetensors").write_bytes(b"who am I")
    (study.checkpoints / "notes.txt").write_text("not ours")
    study.compare(methods="plain", seeds=1, **SETTINGS)
    assert len(study.results()) == 1
    assert any("orphan.safetensors" in note for note in study.reporter.notes)
    assert (study.checkpoints / "notes.txt").exists()


def test_checkpoint_left_by_a_kill_after_its_results_were_kept_is_cleared_away(path):
    study = interrupted(path, methods="plain", seeds=1)
    (checkpoint,) = study.checkpoints.glob("*.safetensors")
    left = checkpoint.read_bytes()
    study.reporter = SilentReporter()
    study.compare(methods="plain", seeds=1, **SETTINGS)
    study.checkpoints.mkdir()
    checkpoint.write_bytes(left)  # as if killed between keeping and deleting
    study.compare(methods="plain,ewc", seeds=1, **SETTINGS)
    assert not study.checkpoints.exists()


def test_file_where_the_checkpoints_go_is_reported_in_one_line(path):
    study = Study(path)
    study.checkpoints.write_text("in the way")
    with pytest.raises(MooringError) as caught:
        study.compare(methods="plain", seeds=1, **SETTINGS)
    assert "\n" not in str(caught.value)


# From Python


def narrow(shape: tuple[int, int, int]) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(shape[1] * shape[2], 7), torch.nn.Tanh())


def halves() -> Stream:
    """Bright to the left or to the right, then bright above or below."""
    images = torch.zeros(16, 1, 6, 6, dtype=torch.uint8)
    images[0:8:2, :, :, :3], images[1:8:2, :, :, 3:] = 255, 255
    images[8::2, :, :3, :], images[9::2, :, 3:, :] = 255, 255
    split = Split(images, torch.arange(16) % 2)
    tasks = tuple(Task(name, torch.arange(8) + 8 * n, torch.arange(8) + 8 * n, (0, 1)) for n, name in enumerate("ab"))
    return Stream("halves", split, split, tasks, scenario="domain")


def test_user_defined_stream_and_network_are_accepted(path):
    arguments = {
        "stream": halves(),
        "network": "laboratory.test_study:narrow",
        "lr": 0.1,
        "batch": 4,
        "epochs": 9,
        "seeds": 1,
    }
    (row,) = Study(path).compare(methods="joint", **arguments)
    assert row.setting.stream == "halves"
    assert row.setting.network.startswith("laboratory.test_study:narrow@")  # with a stamp of its source
    assert row.metrics["accuracy"].mean == 100.0
    assert "backbone.1" in row.results[0].drift


@pytest.mark.parametrize(
    "wrong",
    [
        {"network": narrow},
        {"network": 5},
        {"stream": 5},
        {"stream": []},
        {"methods": 5},
        {"methods": []},
        {"seeds": 0},
        {"seeds": -1},
        {"seeds": "3"},
        {"seeds": [0.5]},
        {"epochs": "1"},
        {"lr": "0.1"},
        {"colour": "blue"},
        {"baseline": "ewc"},
    ],
    ids=lambda given: ", ".join(f"{name}={getattr(value, '__name__', value)}" for name, value in given.items()),
)
def test_what_cannot_be_run_is_refused_in_one_line_before_any_write(tmp_path, wrong):
    with pytest.raises(MooringError) as caught:
        Study(tmp_path / "study.sqlite").compare(**{"methods": "plain", "seeds": 1, **SETTINGS, **wrong})
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    assert newly_trained() == []


@pytest.mark.parametrize("wrong", [{"fleet": 0}, {"device": "gpu"}, {"device": "meta"}], ids=str)
def test_impossible_study_is_refused_in_one_line(path, wrong):
    with pytest.raises(MooringError) as caught:
        Study(path, **wrong)
    assert "\n" not in str(caught.value)


def test_baseline_is_found_by_its_alias(path):
    rows = Study(path).compare(methods="plain,vanilla", baseline="vanilla", seeds=1, **SETTINGS)
    assert [row.difference is not None for row in rows] == [True, True]


# Told as it goes


class RecordingReporter:
    """Writes down every call, and when."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.work: list[int] = []
        self.done: list[int] = []

    def begin(self, fleets, work, done) -> None:
        self.calls.append(("begin", len(fleets)))
        self.work = list(work)

    def advanced(self, number, fleet, done) -> None:
        self.calls.append(("advanced", number))
        self.done.append(done)
        assert self.done[-1] <= self.work[number]

    def finished(self, number, results) -> None:
        self.calls.append(("finished", number))
        self.done = []

    def note(self, line) -> None:
        self.calls.append(("note", 0))

    def close(self) -> None:
        self.calls.append(("close", 0))


def test_reporter_is_reported_in_order_and_at_a_bounded_rate(path):
    reporter = RecordingReporter()
    began = time.monotonic()
    Study(path, reporter=reporter).compare(methods="plain,joint,er", seeds=2, memory=10, **{**SETTINGS, "epochs": 10})
    took = time.monotonic() - began
    assert reporter.calls[0] == ("begin", 3)
    calls = [call for call in reporter.calls[1:] if call[0] != "close"]
    assert [number for _, number in calls] == sorted(number for _, number in calls)
    for number in range(3):
        kinds = [kind for kind, which in calls if which == number]
        assert kinds[-1] == "finished"
        assert kinds.count("finished") == 1
        assert kinds.count("advanced") >= len(STREAM.tasks)  # one after each task
    assert len(calls) <= 3 * (len(STREAM.tasks) + 1) + took / runner.REPORT_SECONDS + 1
    assert reporter.work == [2 * 2 * 2 * 10] * 3


def test_reporter_is_closed_when_it_is_over(path):
    reporter = RecordingReporter()
    Study(path, reporter=reporter).compare(methods="plain", seeds=1, **SETTINGS)
    assert reporter.calls[-1] == ("close", 0)


def test_reporter_is_not_called_if_nothing_is_missing(path):
    Study(path).compare(methods="plain", seeds=1, **SETTINGS)
    reporter = RecordingReporter()
    Study(path, reporter=reporter).compare(methods="plain", seeds=1, **SETTINGS)
    assert [call for call in reporter.calls if call[0] != "close"] == []
