"""A fleet that is stopped anywhere and resumed equals an uninterrupted one, bit for bit; damaged files are refused."""

import errno
import json
import os
import pickle
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save
from torch import nn

from laboratory.small import class_stream, domain_stream, spec_for
from mooring.errors import MooringError
from mooring_lab.fleet import checkpoint
from mooring_lab.fleet.fleet import Fleet
from mooring_lab.model.results import Result
from mooring_lab.model.spec import RunSpec
from mooring_lab.streams import Stream

HERE = "laboratory.test_checkpoint"
CLASSES = class_stream(tasks=3, images=8)
DOMAINS = domain_stream(tasks=3, images=8)
PENALTIES = {"ewc": 3.0, "si": 1.0, "rwalk": 0.1, "random": 0.3, "balanced-ewc": 3.0, "clamped-uniform": 5.0}
STRENGTHS = {**PENALTIES, "si-negative": 0.1, "proximal-ewc": 300.0, "clamped-mas": 1.0, "budget-ewc": 1e-4}
STRENGTHS |= {"budget-kronecker": 1e-4, "summed-ewc": 3.0, "laplace-kronecker": 0.3, "lwf": 1.0, "der++": 0.5}
STRENGTHS |= {"gpm": 0.1, "nscl": 1e3, "owm": 0.1, "ftp": 0.01, "tpgm": 0.01}


class StoppedError(Exception):
    pass


class SaveAt:
    """Saves a fleet at its n-th callback and stops it there; None lets it finish."""

    def __init__(self, path: Path, stop: int | None) -> None:
        self.path, self.stop, self.calls = path, stop, 0

    def on_step(self, fleet: Fleet) -> None:
        if self.calls == self.stop:
            checkpoint.save(fleet, self.path)
            raise StoppedError
        self.calls += 1

    on_task_end = on_step


def specs_for(methods, stream: Stream, seeds=(0, 1), **settings) -> list[RunSpec]:
    specs = []
    for method in methods:
        memory = 5 if method in ("er", "a-gem", "der++", "tpgm") else None
        for seed in seeds:
            spec = spec_for(method, stream, seed, **{"batch": 4, "epochs": 1, "memory": memory, **settings})
            specs.append(replace(spec, lr=0.02 * (seed + 1), strength=STRENGTHS.get(method)))
    return specs


def without_time(results: list[Result]) -> dict[str, str]:
    """Return each result as JSON without its time, for comparison to the last bit."""
    return {r.spec.key: json.dumps({**asdict(r), "seconds": None}, sort_keys=True) for r in results}


def uninterrupted(specs: list[RunSpec], stream: Stream, **options) -> tuple[dict[str, str], int]:
    count = SaveAt(Path("/dev/null"), None)
    return without_time(Fleet(specs, stream, **options).run(count)), count.calls


def stop_at(specs: list[RunSpec], stream: Stream, path: Path, stop: int, **options) -> None:
    with pytest.raises(StoppedError):
        Fleet(specs, stream, **options).run(SaveAt(path, stop))


def resumed(specs: list[RunSpec], stream: Stream, path: Path, **options) -> dict[str, str]:
    fleet = Fleet(specs, stream, **options)
    checkpoint.restore(fleet, path)
    return without_time(fleet.run())


def normalised(shape: tuple[int, int, int]) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU())


def convolving(shape: tuple[int, int, int]) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten())


def dropping(shape: tuple[int, int, int]) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Dropout(0.3))


ADAMW = {"optimizer": "adamw", "lr": 0.003, "weight_decay": 0.1, "schedule": "warmup-linear"}
KINDS = {
    "penalties and steps": (
        ["plain", *PENALTIES, "summed-ewc", "si-negative", "explicit-si", "proximal-ewc", "budget-ewc"],
        CLASSES,
        {"seeds": (1,), "batch": 5},
    ),
    "one head": (["ewc", "balanced-ewc", "explicit-rwalk"], DOMAINS, {"epochs": 2}),
    "outputs": (["explicit-mas", "clamped-mas"], CLASSES, {}),
    "layers": (["laplace-kronecker", "budget-kronecker"], DOMAINS, {"epochs": 2}),
    **{name: ([name], DOMAINS, {}) for name in ("gpm", "nscl", "owm", "ftp")},
    "tpgm": (["tpgm"], CLASSES, {"epochs": 2}),
    "joint": (["joint"], CLASSES, {"epochs": 2}),
    "er": (["er"], CLASSES, {"epochs": 2}),
    "a-gem": (["a-gem"], DOMAINS, {}),
    "lwf": (["lwf"], CLASSES, {"epochs": 2}),
    "lwf with statistics": (["lwf"], DOMAINS, {"network": f"{HERE}:normalised"}),
    "der++": (["der++"], CLASSES, {"epochs": 2}),
    "der++ with statistics": (["der++"], DOMAINS, {"network": f"{HERE}:normalised"}),
    "frozen after first": (["frozen-after-first"], CLASSES, {}),
    "frozen": (["frozen"], CLASSES, {}),
    "statistics": (["plain", "explicit-ewc"], CLASSES, {"network": f"{HERE}:normalised"}),
    "convolutions": (["plain", "ewc"], CLASSES, {"network": f"{HERE}:convolving", "seeds": (0,)}),
    "dropout": (["plain", "explicit-ewc"], CLASSES, {"network": f"{HERE}:dropping"}),
    "dropout and a memory": (["a-gem"], CLASSES, {"network": f"{HERE}:dropping"}),
    "float32": (["plain", "ewc", "explicit-si"], CLASSES, {"dtype": "float32"}),
    "fresh heads": (["ewc"], CLASSES, {"heads": "fresh", "weight_decay": 0.01}),
    "no momentum": (["si"], CLASSES, {"momentum": 0.0}),
    "adamw": (["plain", "ewc", "explicit-si", "budget-ewc"], CLASSES, {"epochs": 2, **ADAMW}),
    "adamw with a memory": (["der++"], CLASSES, {"epochs": 2, **ADAMW}),
    "schedule": (["clamped-ewc", "proximal-ewc"], DOMAINS, {"epochs": 2, "schedule": "warmup-linear"}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_fleet_resumed_after_any_step_or_task_equals_uninterrupted_bit_for_bit(kind, tmp_path):
    methods, stream, settings = KINDS[kind]
    specs = specs_for(methods, stream, **settings)
    expected, calls = uninterrupted(specs, stream)
    assert calls == 3 * 2 * settings.get("epochs", 1) + 3  # after each of two steps an epoch, and after each task
    for stop in range(calls):
        stop_at(specs, stream, tmp_path / "fleet", stop)
        assert resumed(specs, stream, tmp_path / "fleet") == expected, f"stopped at {stop}"


def test_fleet_resumed_after_every_step_equals_uninterrupted(tmp_path):
    specs = specs_for(["si", "balanced-ewc", "explicit-random"], CLASSES)
    expected, calls = uninterrupted(specs, CLASSES)
    stop_at(specs, CLASSES, tmp_path / "fleet", 0)
    for _ in range(calls - 1):
        fleet = Fleet(specs, CLASSES)
        checkpoint.restore(fleet, tmp_path / "fleet")
        with pytest.raises(StoppedError):
            fleet.run(SaveAt(tmp_path / "fleet", 0))
    assert resumed(specs, CLASSES, tmp_path / "fleet") == expected


def test_saving_does_not_change_results(tmp_path):
    class Every:
        def on_step(self, fleet: Fleet) -> None:
            checkpoint.save(fleet, tmp_path / "fleet")

        on_task_end = on_step

    specs = specs_for(["si", "explicit-ewc"], CLASSES)
    assert without_time(Fleet(specs, CLASSES).run(Every())) == uninterrupted(specs, CLASSES)[0]


@pytest.mark.parametrize(("methods", "row"), [(["ewc", "explicit-ewc"], 0), (["ewc", "explicit-ewc"], 1), (["er"], 0)])
def test_fleet_with_a_failed_run_resumes_bit_for_bit(methods, row, tmp_path):
    specs = specs_for(methods, CLASSES)
    bad = {"lr": 1e200} if methods == ["er"] else {"strength": 1e200}
    specs[row] = replace(specs[row], **bad)
    expected, calls = uninterrupted(specs, CLASSES)
    assert sorted(json.loads(r)["status"] for r in expected.values()) == ["finished"] * (len(specs) - 1) + ["unstable"]
    for stop in range(calls):
        stop_at(specs, CLASSES, tmp_path / "fleet", stop)
        assert checkpoint.runs_in(tmp_path / "fleet") == {spec.key for spec in specs}
        assert resumed(specs, CLASSES, tmp_path / "fleet") == expected, f"stopped at {stop}"


def test_fleet_with_a_rejected_run_resumes_bit_for_bit(tmp_path):
    specs = specs_for(["ewc", "balanced-ewc"], CLASSES)
    specs[2] = replace(specs[2], strength=1e12)
    expected, calls = uninterrupted(specs, CLASSES, reject=True)
    assert sorted(json.loads(r)["status"] for r in expected.values()) == ["finished"] * 3 + ["rejected"]
    for stop in range(calls):
        stop_at(specs, CLASSES, tmp_path / "fleet", stop, reject=True)
        assert resumed(specs, CLASSES, tmp_path / "fleet", reject=True) == expected


def test_runs_given_in_another_order_resume(tmp_path):
    """The engine finds a checkpoint whatever the order of its runs is, as after `--seeds 1,0`."""
    specs = specs_for(["plain", "ewc"], CLASSES, seeds=(0, 1, 2))
    expected, _ = uninterrupted(specs, CLASSES)
    stop_at(specs, CLASSES, tmp_path / "fleet", 4)
    assert resumed(specs[::-1], CLASSES, tmp_path / "fleet") == expected


# A subset of the runs


def assert_close_results(actual: dict[str, str], expected: dict[str, str], specs: list[RunSpec]) -> None:
    """Check that there are results of exactly these runs, each equal to nine digits."""
    assert actual.keys() == {spec.key for spec in specs}
    for key, result in actual.items():
        for value, other in zip(leaves(json.loads(result)), leaves(json.loads(expected[key])), strict=True):
            assert value == (pytest.approx(other, rel=1e-9, abs=1e-12) if isinstance(other, float) else other)


def leaves(value: object) -> list[object]:
    """Return the names and values of a result as a flat list."""
    if isinstance(value, dict):
        return [leaf for name in sorted(value) for leaf in (name, *leaves(value[name]))]
    return [leaf for part in value for leaf in leaves(part)] if isinstance(value, list) else [value]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "float32"])
def test_subset_of_a_checkpoint_resumes_as_with_the_other_runs(kind, tmp_path):
    methods, stream, settings = KINDS[kind]
    specs = specs_for(methods, stream, **{**settings, "seeds": (0, 1, 2)})
    expected, _ = uninterrupted(specs, stream)
    selected = specs[len(methods) % 2 :: 2]  # the runs that are left out are between them
    for stop in (1, 4):
        stop_at(specs, stream, tmp_path / "fleet", stop)
        assert_close_results(resumed(selected, stream, tmp_path / "fleet"), expected, selected)


@pytest.mark.parametrize("settings", [{}, ADAMW], ids=["sgd", "adamw"])
def test_split_checkpoints_resume_like_the_whole(settings, tmp_path):
    specs = specs_for(["plain", "si", "ewc"], CLASSES, seeds=(0, 1), **settings)
    specs[1], specs[4] = replace(specs[1], lr=1e200), replace(specs[4], strength=1e200)  # one fails early, one late
    expected, _ = uninterrupted(specs, CLASSES)
    parts = {tmp_path / "one": specs[:2], tmp_path / "other": specs[2:5], tmp_path / "last": specs[5:]}
    for stop in (1, 4, 7):
        stop_at(specs, CLASSES, tmp_path / "fleet", stop)
        before = (tmp_path / "fleet").read_bytes()
        keys = {path: {spec.key for spec in part} for path, part in parts.items()}
        assert checkpoint.split(tmp_path / "fleet", keys) == checkpoint.steps_in(tmp_path / "fleet")
        assert (tmp_path / "fleet").read_bytes() == before
        for path, part in parts.items():
            assert checkpoint.runs_in(path) == keys[path]
            assert resumed(part, CLASSES, path) == resumed(part, CLASSES, tmp_path / "fleet")  # to the last bit
            assert_close_results(resumed(part, CLASSES, path), expected, part)


def test_damaged_checkpoint_is_not_split(saved, tmp_path):
    whole = bytearray(saved.read_bytes())
    whole[-1] ^= 1
    saved.write_bytes(bytes(whole))
    with pytest.raises(checkpoint.CheckpointError, match="is damaged"):
        checkpoint.split(saved, {tmp_path / "part": {spec_.key for spec_ in specs_for(["ewc"], CLASSES)}})
    assert not (tmp_path / "part").exists()


# The file


@pytest.fixture
def saved(tmp_path) -> Path:
    path = tmp_path / "fleet.safetensors"
    stop_at(specs_for(["ewc", "plain"], CLASSES), CLASSES, path, 4)
    return path


def assert_refused(path: Path, specs: list[RunSpec] | None = None, match: str = "cannot be read: delete it") -> None:
    """Check that restoring fails with one line that names the file."""
    fleet = Fleet(specs or specs_for(["ewc", "plain"], CLASSES), CLASSES)
    with pytest.raises(MooringError, match=match) as error:
        checkpoint.restore(fleet, path)
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("broken", ["replace", "fsync"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=["disk full", "disk broken"])
def test_failed_write_keeps_the_old_checkpoint_and_gives_a_one_line_error(saved, monkeypatch, broken, number):
    before = saved.read_bytes()

    def fail(*args: object) -> None:
        raise OSError(number, os.strerror(number))

    fleet = Fleet(specs_for(["ewc", "plain"], CLASSES), CLASSES)
    monkeypatch.setattr(f"mooring_lab.model.atomic_files.os.{broken}", fail)
    with pytest.raises(MooringError, match="make room, or choose another place") as error:
        checkpoint.save(fleet, saved)
    assert "\n" not in str(error.value)
    assert os.strerror(number) in str(error.value)
    assert saved.read_bytes() == before
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]  # nothing half-written stays


def test_kill_during_the_write_keeps_the_old_checkpoint(saved, monkeypatch):
    specs = specs_for(["ewc", "plain"], CLASSES)
    expected, _ = uninterrupted(specs, CLASSES)
    after: list[Path] = []

    def kill(source: Path, target: Path) -> None:
        after.append(Path(source))
        raise KeyboardInterrupt

    monkeypatch.setattr("mooring_lab.model.atomic_files.os.replace", kill)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(Fleet(specs, CLASSES), saved)
    monkeypatch.undo()
    assert after  # the kill came just before the rename
    after[0].write_bytes(b"half of it")  # as after kill -9, which leaves the temporary file
    assert resumed(specs, CLASSES, saved) == expected


def test_checkpoint_file_is_never_incomplete(saved, monkeypatch):
    """At the time of the rename the path holds the old file, and the new file is complete."""
    before, seen = saved.read_bytes(), []
    really = os.replace

    def watch(source: Path, target: Path) -> None:
        load(Path(source).read_bytes())
        seen.append(Path(target).read_bytes() == before and Path(source).parent == Path(target).parent)
        really(source, target)

    monkeypatch.setattr("mooring_lab.model.atomic_files.os.replace", watch)
    stop_at(specs_for(["ewc", "plain"], CLASSES), CLASSES, saved, 6)
    assert seen == [True]
    assert saved.read_bytes() != before


def test_truncated_checkpoint_is_refused_in_one_line(saved):
    whole = saved.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for length in (0, 1, 7, 8, 9, 100, header - 1, header, header + 1, len(whole) // 2, len(whole) - 8, len(whole) - 1):
        saved.write_bytes(whole[:length])
        assert_refused(saved)
        with pytest.raises(MooringError, match="cannot be read"):
            checkpoint.runs_in(saved)
    saved.write_bytes(whole)
    checkpoint.restore(Fleet(specs_for(["ewc", "plain"], CLASSES), CLASSES), saved)


def rewrite_header(path: Path, **changes: object) -> None:
    """Change entries of the header and keep the tensors; None removes an entry."""
    whole = path.read_bytes()
    header = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])["__metadata__"]["mooring"]
    changed = {name: value for name, value in {**json.loads(header), **changes}.items() if value is not None}
    path.write_bytes(save(load(whole), metadata={"mooring": json.dumps(changed)}))


@pytest.mark.parametrize("change", [-1, 1], ids=["older", "newer"])
def test_checkpoint_of_another_version_is_refused_in_one_line(saved, change):
    rewrite_header(saved, version=checkpoint.VERSION + change)
    assert_refused(
        saved, match=rf"has version {checkpoint.VERSION + change}, this Mooring reads {checkpoint.VERSION}: "
    )


DAMAGE = [
    {"version": None},
    {"version": "one"},
    {"runs": None},
    {"records": None},
    {"position": None},
    {"position": {"leg": 1}},
    {"groups": []},
    {"groups": [{"tasks": 1}]},
]


def test_checkpoint_with_a_damaged_header_is_refused_in_one_line(saved):
    whole = saved.read_bytes()
    for change in DAMAGE:
        saved.write_bytes(whole)
        rewrite_header(saved, **change)
        assert_refused(saved)


def test_checkpoint_whose_header_is_no_json_object_is_refused_in_one_line(saved):
    tensors = load(saved.read_bytes())
    for text in ("null", "[]", "", "{", "\x00"):
        saved.write_bytes(save(tensors, metadata={"mooring": text}))
        assert_refused(saved)


def test_checkpoint_that_lacks_a_tensor_is_refused_in_one_line(saved):
    whole = saved.read_bytes()
    header = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])["__metadata__"]
    tensors = load(whole)
    for name in ("plugin/records/losses", "parameter/heads.0.weight", "group/1/backbone.1.weight/anchor"):
        saved.write_bytes(save({n: t for n, t in tensors.items() if n != name}, metadata=header))
        assert_refused(saved, match="is damaged: delete it")


def test_flipped_bit_is_detected(saved):
    whole = bytearray(saved.read_bytes())
    for place in (-1, -len(whole) // 3):
        flipped = bytearray(whole)
        flipped[place] ^= 1
        saved.write_bytes(bytes(flipped))
        assert_refused(saved, match="is damaged: delete it")


@pytest.mark.parametrize(
    "others",
    [
        specs_for(["ewc", "plain"], CLASSES, seeds=(5, 6)),
        specs_for(["ewc", "plain"], CLASSES, seeds=(1, 2)),
        specs_for(["ewc", "plain"], CLASSES, seeds=(0, 1, 2)),
        specs_for(["ewc", "plain"], CLASSES, weight_decay=0.1),
    ],
    ids=["none of them", "some of them and others", "more", "other settings"],
)
def test_checkpoint_of_other_runs_is_refused_in_one_line(saved, others):
    assert_refused(saved, others, match="is of other runs: delete it to start again")


def test_missing_or_foreign_file_is_refused_in_one_line(tmp_path):
    assert_refused(tmp_path / "nothing")
    assert_refused(tmp_path)
    (tmp_path / "weights").write_bytes(save({"weight": torch.zeros(1)}))
    assert_refused(tmp_path / "weights")


class Bomb:
    """An object that creates a folder when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (os.environ["MOORING_BOMB"],)


def test_checkpoint_is_safetensors_and_nothing_is_unpickled(saved, monkeypatch, tmp_path):
    whole = saved.read_bytes()
    index = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])  # length, JSON, bytes
    assert "plugin/records/losses" in index
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, None)
    for name in ("load", "save"):
        monkeypatch.setattr(torch, name, None)
    assert len(resumed(specs_for(["ewc", "plain"], CLASSES), CLASSES, saved)) == 4
    monkeypatch.setenv("MOORING_BOMB", str(tmp_path / "went off"))
    saved.write_bytes(pickle.dumps(Bomb()))
    assert_refused(saved)
    assert not (tmp_path / "went off").exists()


def test_failed_run_that_is_not_yet_removed_survives_a_checkpoint(tmp_path):
    """A GPU is checked for failed runs only every few steps; a checkpoint may be written in between."""
    specs = [spec_for("plain", CLASSES, seed, batch=4, epochs=1) for seed in (0, 1)]
    path = tmp_path / "fleet.safetensors"

    class Stopper:
        def on_step(self, fleet):
            if fleet.steps == 3:
                fleet.first_bad[1] = 2
                checkpoint.save(fleet, path)
                raise KeyboardInterrupt

        def on_task_end(self, fleet):
            pass

    with pytest.raises(KeyboardInterrupt):
        Fleet(specs, CLASSES).run(Stopper())
    fleet = Fleet(specs, CLASSES)
    checkpoint.restore(fleet, path)
    results = {result.spec.seed: result for result in fleet.run()}
    assert (results[0].status, results[1].status) == ("finished", "unstable")
    assert results[1].steps == 2
    assert results[1].reason.startswith("its gradient was not finite in step 3")
