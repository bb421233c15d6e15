"""A fleet stopped anywhere and continued equals one never stopped, bit for bit; a checkpoint is whole or refused."""

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

from lab.small import class_stream, domain_stream, spec_for
from mooring.errors import MooringError
from mooring.lab.fleet import checkpoint
from mooring.lab.fleet.fleet import Fleet
from mooring.lab.model.results import Result
from mooring.lab.model.spec import RunSpec
from mooring.lab.streams import Stream

HERE = "lab.test_checkpoint"
CLASSES = class_stream(tasks=3, images=8)
DOMAINS = domain_stream(tasks=3, images=8)
PENALTIES = {"ewc": 3.0, "si": 1.0, "rwalk": 0.1, "random": 0.3, "balanced-ewc": 3.0, "clamped-uniform": 5.0}
STRENGTHS = {**PENALTIES, "si-negative": 0.1, "proximal-ewc": 300.0, "clamped-mas": 1.0, "budget-ewc": 1e-4}
STRENGTHS["budget-kronecker"] = 1e-4


class StoppedError(Exception):
    pass


class SaveAt:
    """Saves a fleet at its n-th look or harbour, and stops it there; None lets it sail."""

    def __init__(self, path: Path, stop: int | None) -> None:
        self.path, self.stop, self.calls = path, stop, 0

    def on_step(self, fleet: Fleet) -> None:
        if self.calls == self.stop:
            checkpoint.save(fleet, self.path)
            raise StoppedError
        self.calls += 1

    on_task_end = on_step


def specs_for(methods, stream: Stream, seeds=(0, 1), **rest) -> list[RunSpec]:
    made = []
    for method in methods:
        memory = 5 if method in ("er", "a-gem") else None
        for seed in seeds:
            spec = spec_for(method, stream, seed, **{"batch": 4, "epochs": 1, "memory": memory, **rest})
            made.append(replace(spec, lr=0.02 * (seed + 1), strength=STRENGTHS.get(method)))
    return made


def told(results: list[Result]) -> dict[str, str]:
    """Everything but the time it took, to the last bit."""
    return {r.spec.key: json.dumps({**asdict(r), "seconds": None}, sort_keys=True) for r in results}


def never_stopped(specs: list[RunSpec], stream: Stream, **rest) -> tuple[dict[str, str], int]:
    count = SaveAt(Path("/dev/null"), None)
    return told(Fleet(specs, stream, **rest).run(count)), count.calls


def stopped_at(specs: list[RunSpec], stream: Stream, path: Path, stop: int, **rest) -> None:
    with pytest.raises(StoppedError):
        Fleet(specs, stream, **rest).run(SaveAt(path, stop))


def continued(specs: list[RunSpec], stream: Stream, path: Path, **rest) -> dict[str, str]:
    fleet = Fleet(specs, stream, **rest)
    checkpoint.restore(fleet, path)
    return told(fleet.run())


def normalised(shape: tuple[int, int, int]) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU())


def convolving(shape: tuple[int, int, int]) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten())


def dropping(shape: tuple[int, int, int]) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Dropout(0.3))


KINDS = {
    "penalties and steps": (
        ["plain", *PENALTIES, "si-negative", "explicit-si", "proximal-ewc", "budget-ewc"],
        CLASSES,
        {"seeds": (1,), "batch": 5},
    ),
    "one head": (["ewc", "balanced-ewc", "explicit-rwalk"], DOMAINS, {"epochs": 2}),
    "outputs": (["explicit-mas", "clamped-mas"], CLASSES, {}),
    "layers": (["budget-kronecker"], DOMAINS, {"epochs": 2}),
    "joint": (["joint"], CLASSES, {"epochs": 2}),
    "er": (["er"], CLASSES, {"epochs": 2}),
    "a-gem": (["a-gem"], DOMAINS, {}),
    "frozen after first": (["frozen-after-first"], CLASSES, {}),
    "frozen": (["frozen"], CLASSES, {}),
    "statistics": (["plain", "explicit-ewc"], CLASSES, {"network": f"{HERE}:normalised"}),
    "convolutions": (["plain", "ewc"], CLASSES, {"network": f"{HERE}:convolving", "seeds": (0,)}),
    "dropout": (["plain", "explicit-ewc"], CLASSES, {"network": f"{HERE}:dropping"}),
    "dropout and a memory": (["a-gem"], CLASSES, {"network": f"{HERE}:dropping"}),
    "float32": (["plain", "ewc", "explicit-si"], CLASSES, {"dtype": "float32"}),
    "fresh heads": (["ewc"], CLASSES, {"heads": "fresh", "weight_decay": 0.01}),
    "no momentum": (["si"], CLASSES, {"momentum": 0.0}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_stopped_after_any_step_or_task_and_continued_equals_never_stopped_bit_for_bit(kind, tmp_path):
    methods, stream, rest = KINDS[kind]
    specs = specs_for(methods, stream, **rest)
    expected, calls = never_stopped(specs, stream)
    assert calls == 3 * 2 * rest.get("epochs", 1) + 3  # after each of two steps an epoch, and after each task
    for stop in range(calls):
        stopped_at(specs, stream, tmp_path / "fleet", stop)
        assert continued(specs, stream, tmp_path / "fleet") == expected, f"stopped at {stop}"


def test_stopped_again_and_again_equals_never_stopped(tmp_path):
    specs = specs_for(["si", "balanced-ewc", "explicit-random"], CLASSES)
    expected, calls = never_stopped(specs, CLASSES)
    stopped_at(specs, CLASSES, tmp_path / "fleet", 0)
    for _ in range(calls - 1):
        fleet = Fleet(specs, CLASSES)
        checkpoint.restore(fleet, tmp_path / "fleet")
        with pytest.raises(StoppedError):
            fleet.run(SaveAt(tmp_path / "fleet", 0))
    assert continued(specs, CLASSES, tmp_path / "fleet") == expected


def test_saving_a_fleet_does_not_change_its_course(tmp_path):
    class Every:
        def on_step(self, fleet: Fleet) -> None:
            checkpoint.save(fleet, tmp_path / "fleet")

        on_task_end = on_step

    specs = specs_for(["si", "explicit-ewc"], CLASSES)
    assert told(Fleet(specs, CLASSES).run(Every())) == never_stopped(specs, CLASSES)[0]


@pytest.mark.parametrize(("methods", "row"), [(["ewc", "explicit-ewc"], 0), (["ewc", "explicit-ewc"], 1), (["er"], 0)])
def test_a_fleet_that_lost_a_run_continues_bit_for_bit_too(methods, row, tmp_path):
    specs = specs_for(methods, CLASSES)
    bad = {"lr": 1e200} if methods == ["er"] else {"strength": 1e200}
    specs[row] = replace(specs[row], **bad)
    expected, calls = never_stopped(specs, CLASSES)
    assert sorted(json.loads(r)["status"] for r in expected.values()) == ["finished"] * (len(specs) - 1) + ["unstable"]
    for stop in range(calls):
        stopped_at(specs, CLASSES, tmp_path / "fleet", stop)
        assert checkpoint.runs_in(tmp_path / "fleet") == {spec.key for spec in specs}
        assert continued(specs, CLASSES, tmp_path / "fleet") == expected, f"stopped at {stop}"


def test_a_fleet_with_a_rejected_run_continues_bit_for_bit_too(tmp_path):
    specs = specs_for(["ewc", "balanced-ewc"], CLASSES)
    specs[2] = replace(specs[2], strength=1e12)
    expected, calls = never_stopped(specs, CLASSES, reject=True)
    assert sorted(json.loads(r)["status"] for r in expected.values()) == ["finished"] * 3 + ["rejected"]
    for stop in range(calls):
        stopped_at(specs, CLASSES, tmp_path / "fleet", stop, reject=True)
        assert continued(specs, CLASSES, tmp_path / "fleet", reject=True) == expected


def test_the_same_runs_named_in_another_order_continue_as_themselves(tmp_path):
    """The engine finds a checkpoint whatever the order of its runs is, as after `--seeds 1,0`."""
    specs = specs_for(["plain", "ewc"], CLASSES, seeds=(0, 1, 2))
    expected, _ = never_stopped(specs, CLASSES)
    stopped_at(specs, CLASSES, tmp_path / "fleet", 4)
    assert continued(specs[::-1], CLASSES, tmp_path / "fleet") == expected


# Some of the runs


def near(found: dict[str, str], expected: dict[str, str], some: list[RunSpec]) -> None:
    """These runs and no others, each as it should be to nine digits."""
    assert found.keys() == {spec.key for spec in some}
    for key, told_ in found.items():
        for mine, theirs in zip(numbers(json.loads(told_)), numbers(json.loads(expected[key])), strict=True):
            assert mine == (pytest.approx(theirs, rel=1e-9, abs=1e-12) if isinstance(theirs, float) else theirs)


def numbers(value: object) -> list[object]:
    """Everything in a result, one after the other."""
    if isinstance(value, dict):
        return [each for name in sorted(value) for each in (name, *numbers(value[name]))]
    return [each for part in value for each in numbers(part)] if isinstance(value, list) else [value]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "float32"])
def test_some_runs_of_a_checkpoint_continue_as_they_would_with_the_others(kind, tmp_path):
    methods, stream, rest = KINDS[kind]
    specs = specs_for(methods, stream, **{**rest, "seeds": (0, 1, 2)})
    expected, _ = never_stopped(specs, stream)
    some = specs[len(methods) % 2 :: 2]  # what is left out lies between them
    for stop in (1, 4):
        stopped_at(specs, stream, tmp_path / "fleet", stop)
        near(continued(some, stream, tmp_path / "fleet"), expected, some)


def test_a_checkpoint_is_split_into_those_of_its_parts_and_they_lack_nothing(tmp_path):
    specs = specs_for(["plain", "si", "ewc"], CLASSES, seeds=(0, 1))
    specs[1], specs[4] = replace(specs[1], lr=1e200), replace(specs[4], strength=1e200)  # one is lost early, one late
    expected, _ = never_stopped(specs, CLASSES)
    parts = {tmp_path / "one": specs[:2], tmp_path / "other": specs[2:5], tmp_path / "last": specs[5:]}
    for stop in (1, 4, 7):
        stopped_at(specs, CLASSES, tmp_path / "fleet", stop)
        before = (tmp_path / "fleet").read_bytes()
        keys = {path: {spec.key for spec in part} for path, part in parts.items()}
        assert checkpoint.split(tmp_path / "fleet", keys) == checkpoint.steps_in(tmp_path / "fleet")
        assert (tmp_path / "fleet").read_bytes() == before
        for path, part in parts.items():
            assert checkpoint.runs_in(path) == keys[path]
            assert continued(part, CLASSES, path) == continued(part, CLASSES, tmp_path / "fleet")  # to the last bit
            near(continued(part, CLASSES, path), expected, part)


def test_a_damaged_checkpoint_is_not_split(saved, tmp_path):
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
    stopped_at(specs_for(["ewc", "plain"], CLASSES), CLASSES, path, 4)
    return path


def refused(path: Path, specs: list[RunSpec] | None = None, match: str = "cannot be read: delete it") -> None:
    """By everything that reads a checkpoint, in one line that names the file."""
    fleet = Fleet(specs or specs_for(["ewc", "plain"], CLASSES), CLASSES)
    with pytest.raises(MooringError, match=match) as error:
        checkpoint.restore(fleet, path)
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("broken", ["replace", "fsync"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=["disk full", "disk broken"])
def test_a_write_that_fails_leaves_the_old_checkpoint_whole_and_says_so_in_one_line(saved, monkeypatch, broken, number):
    before = saved.read_bytes()

    def fail(*args: object) -> None:
        raise OSError(number, os.strerror(number))

    fleet = Fleet(specs_for(["ewc", "plain"], CLASSES), CLASSES)
    monkeypatch.setattr(f"mooring.lab.model.atomic_files.os.{broken}", fail)
    with pytest.raises(MooringError, match="make room, or choose another place") as error:
        checkpoint.save(fleet, saved)
    assert "\n" not in str(error.value)
    assert os.strerror(number) in str(error.value)
    assert saved.read_bytes() == before
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]  # nothing half-written stays


def test_a_kill_during_the_write_leaves_the_old_checkpoint_to_continue_from(saved, monkeypatch):
    specs = specs_for(["ewc", "plain"], CLASSES)
    expected, _ = never_stopped(specs, CLASSES)
    after: list[Path] = []

    def kill(source: Path, target: Path) -> None:
        after.append(Path(source))
        raise KeyboardInterrupt

    monkeypatch.setattr("mooring.lab.model.atomic_files.os.replace", kill)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(Fleet(specs, CLASSES), saved)
    monkeypatch.undo()
    assert after  # it had come to the last moment
    after[0].write_bytes(b"half of it")  # as after kill -9, when nobody tidies up
    assert continued(specs, CLASSES, saved) == expected


def test_a_checkpoint_is_never_seen_half_written(saved, monkeypatch):
    """What is at the path when the file is renamed there is the old one, and what is renamed is complete."""
    before, seen = saved.read_bytes(), []
    really = os.replace

    def watch(source: Path, target: Path) -> None:
        load(Path(source).read_bytes())
        seen.append(Path(target).read_bytes() == before and Path(source).parent == Path(target).parent)
        really(source, target)

    monkeypatch.setattr("mooring.lab.model.atomic_files.os.replace", watch)
    stopped_at(specs_for(["ewc", "plain"], CLASSES), CLASSES, saved, 6)
    assert seen == [True]
    assert saved.read_bytes() != before


def test_a_checkpoint_cut_short_anywhere_is_refused_in_one_line(saved):
    whole = saved.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for length in (0, 1, 7, 8, 9, 100, header - 1, header, header + 1, len(whole) // 2, len(whole) - 8, len(whole) - 1):
        saved.write_bytes(whole[:length])
        refused(saved)
        with pytest.raises(MooringError, match="cannot be read"):
            checkpoint.runs_in(saved)
    saved.write_bytes(whole)
    checkpoint.restore(Fleet(specs_for(["ewc", "plain"], CLASSES), CLASSES), saved)


def rewritten(path: Path, **changes: object) -> None:
    """The same tensors under a header with some things changed; None takes them out."""
    whole = path.read_bytes()
    header = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])["__metadata__"]["mooring"]
    told = {name: value for name, value in {**json.loads(header), **changes}.items() if value is not None}
    path.write_bytes(save(load(whole), metadata={"mooring": json.dumps(told)}))


@pytest.mark.parametrize("change", [-1, 1], ids=["older", "newer"])
def test_checkpoint_of_another_version_is_refused_in_one_line(saved, change):
    rewritten(saved, version=checkpoint.VERSION + change)
    refused(saved, match=rf"has version {checkpoint.VERSION + change}, this Mooring reads {checkpoint.VERSION}: ")


DAMAGE = [
    {"version": None},
    {"version": "one"},
    {"runs": None},
    {"books": None},
    {"position": None},
    {"position": {"leg": 1}},
    {"groups": []},
    {"groups": [{"tasks": 1}]},
]


def test_a_checkpoint_with_a_damaged_header_is_refused_in_one_line(saved):
    whole = saved.read_bytes()
    for change in DAMAGE:
        saved.write_bytes(whole)
        rewritten(saved, **change)
        refused(saved)


def test_a_checkpoint_whose_header_is_no_json_object_is_refused_in_one_line(saved):
    tensors = load(saved.read_bytes())
    for text in ("null", "[]", "", "{", "\x00"):
        saved.write_bytes(save(tensors, metadata={"mooring": text}))
        refused(saved)


def test_a_checkpoint_that_lacks_a_tensor_is_refused_in_one_line(saved):
    whole = saved.read_bytes()
    header = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])["__metadata__"]
    tensors = load(whole)
    for name in ("curve", "parameter/heads.0.weight", "held/0/backbone.1.weight/anchor"):
        saved.write_bytes(save({n: t for n, t in tensors.items() if n != name}, metadata=header))
        refused(saved, match="is damaged: delete it")


def test_a_bit_that_flipped_on_the_disk_is_noticed(saved):
    whole = bytearray(saved.read_bytes())
    for place in (-1, -len(whole) // 3):
        flipped = bytearray(whole)
        flipped[place] ^= 1
        saved.write_bytes(bytes(flipped))
        refused(saved, match="is damaged: delete it")


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
def test_a_checkpoint_of_other_runs_is_refused_in_one_line(saved, others):
    refused(saved, others, match="is of other runs: delete it to start again")


def test_a_checkpoint_that_is_not_there_or_not_one_is_refused_in_one_line(tmp_path):
    refused(tmp_path / "nothing")
    refused(tmp_path)
    (tmp_path / "weights").write_bytes(save({"weight": torch.zeros(1)}))
    refused(tmp_path / "weights")


class Bomb:
    """Does something when unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (os.environ["MOORING_BOMB"],)


def test_a_checkpoint_is_safetensors_and_nothing_is_ever_unpickled(saved, monkeypatch, tmp_path):
    whole = saved.read_bytes()
    assert "curve" in json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])  # length, JSON, bytes
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, None)
    for name in ("load", "save"):
        monkeypatch.setattr(torch, name, None)
    assert len(continued(specs_for(["ewc", "plain"], CLASSES), CLASSES, saved)) == 4
    monkeypatch.setenv("MOORING_BOMB", str(tmp_path / "went off"))
    saved.write_bytes(pickle.dumps(Bomb()))
    refused(saved)
    assert not (tmp_path / "went off").exists()


def test_a_run_that_is_lost_but_not_yet_taken_out_is_not_forgotten(tmp_path):
    """On a GPU that is seen only every so many steps; a checkpoint may be written in between."""
    specs = [spec_for("plain", CLASSES, seed, batch=4, epochs=1) for seed in (0, 1)]
    path = tmp_path / "fleet.safetensors"

    class Stopper:
        def on_step(self, fleet):
            if fleet.steps == 3:
                fleet.bad[1] = 2
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
