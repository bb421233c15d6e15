"""A study run twice on one machine gives the same to the last bit, whatever else was drawn before.

On the CPU always; on a GPU with --deterministic.
"""

import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from faults.small import often, times
from lab.small import Once, class_stream, gpu, spec_for
from lab.test_kill import rows
from mooring.errors import MooringError
from mooring.lab.engines.checkpoint_index import Unfinished
from mooring.lab.engines.local import Local
from mooring.lab.engines.runner import Aboard
from mooring.lab.fleet.fleet import Fleet
from mooring.lab.model.determinism import configure_cublas, deterministic
from mooring.lab.study.store import Store
from mooring.lab.study.study import Study
from processes import Child, command, wait_for

ASKED = ["compare", "--methods", "all", "--seeds", "2", "--limit", "20", "--tasks", "3", "--epochs", "1"]
ASKED += ["--batch", "5", "--memory", "8", "--study", "study.sqlite"]


def after_other_draws(*arguments: str) -> int:
    """The command in a process whose global random state is another."""
    import random

    import numpy
    import torch

    random.seed(7)
    numpy.random.seed(7)
    torch.manual_seed(7)
    torch.rand(1000)
    return command(*arguments)


def test_a_study_run_twice_gives_identical_results(tmp_path):
    from lab.test_determinism import after_other_draws as target

    found = []
    for name, act in (("one", command), ("other", target)):
        told = Child(tmp_path / name, act, *ASKED, patience=240).ended()
        assert told.status == 0, told.err
        found.append(rows(tmp_path / name))
    assert len(found[0]) >= 2 * 40
    assert found[0] == found[1]


# --deterministic

FEW = [
    "compare",
    "--methods",
    "plain,er,explicit-mas,budget-kronecker",
    "--seeds",
    "2",
    "--limit",
    "20",
    "--tasks",
    "3",
]
FEW += ["--epochs", "1", "--batch", "5", "--memory", "8", "--study", "study.sqlite"]


def made(folder: Path, asked: list[str], *more: str, target=command) -> list[tuple]:
    """What a study gives in a process of its own."""
    told = Child(folder, target, *asked, *more, patience=600).ended()
    assert told.status == 0, told.err
    return rows(folder)


def versions(folder: Path) -> list[dict[str, str]]:
    return [result.versions for result in Store(folder / "study.sqlite").results()]


def test_on_a_cpu_it_changes_no_bit_and_results_say_so(tmp_path):
    from lab.test_determinism import after_other_draws as target

    assert made(tmp_path / "one", FEW) == made(tmp_path / "other", FEW, "--deterministic", target=target)
    assert {told.get("deterministic") for told in versions(tmp_path / "one")} == {None}
    assert {told.get("deterministic") for told in versions(tmp_path / "other")} == {"yes"}


def test_fleets_are_the_same_whatever_is_done_already(tmp_path):
    stream = class_stream(tasks=2, images=8)
    specs = [spec_for("plain", stream, seed, epochs=1) for seed in range(10)]
    study = Study(tmp_path / "study.sqlite", fleet=4, deterministic=True)
    runner = Local(Aboard({stream.fingerprint: stream}, {}, deterministic=True), study.checkpoints)
    whole = study._planned(specs, runner, False, specs)
    assert [len(fleet) for fleet in whole] == [4, 3, 3]
    assert study._planned([*whole[0], *whole[2]], runner, False, specs) == [whole[0], whole[2]]
    assert study._planned(whole[1][1:], runner, False, specs) == [whole[1][1:]]


def test_a_fleet_continues_from_its_like_only(tmp_path):
    stream = class_stream(tasks=2, images=8)
    specs = [spec_for("plain", stream, seed, batch=4, epochs=1) for seed in range(4)]
    every = {same: Unfinished(tmp_path, "cpu", False, deterministic=same) for same in (False, True)}
    for unfinished in every.values():
        Fleet(specs, stream).run(Once(unfinished.path([spec.key for spec in specs])))
    for same, unfinished in every.items():
        assert unfinished.sources(specs) == [unfinished.path([spec.key for spec in specs])]
        assert bool(unfinished.sources(specs[:2])) is not same  # a part is another computation


def test_what_cannot_be_the_same_each_time_is_refused_in_one_line(monkeypatch):
    before = torch.get_deterministic_debug_mode()
    line = r"^put_ is not deterministic: leave --deterministic out"
    with pytest.raises(MooringError, match=line) as caught, deterministic():
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))
    assert "\n" not in str(caught.value)
    assert torch.get_deterministic_debug_mode() == before
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    with pytest.raises(MooringError, match=r"^CUBLAS_WORKSPACE_CONFIG=:0:0 is not deterministic: give :4096:8 or"):
        configure_cublas("cuda")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(MooringError, match=r"^CUDA has started in this process"):
        configure_cublas("cuda")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    configure_cublas("cuda")
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


# On a GPU

ON_GPU = ["--device", "cuda", "--deterministic", "--limit", "60", "--tasks", "3", "--batch", "10", "--memory", "15"]
ON_GPU += ["--study", "study.sqlite"]
CASES = {
    "every method": ["--methods", "all", "--seeds", "3", "--epochs", "2"],
    "cnn6 in tf32": ["--methods", "plain,ewc,er,a-gem,explicit-mas,budget-ewc", "--network", "cnn6", "--epochs", "4"],
    "cnn6 in bf16": ["--methods", "plain,explicit-ewc,er", "--network", "cnn6", "--epochs", "4", "--dtype", "bf16"],
    "cnn6 in float32": ["--methods", "plain,explicit-ewc,er", "--network", "cnn6", "--dtype", "float32"],
    "resnet in tf32": ["--methods", "plain,explicit-si,er", "--network", "resnet18-third", "--epochs", "2"],
}


@gpu
@pytest.mark.parametrize("case", CASES)
def test_on_a_gpu_a_study_run_twice_gives_the_same_bits(tmp_path, case):
    from lab.test_determinism import after_other_draws as target

    asked = ["compare", *CASES[case], *ON_GPU]
    one, other = made(tmp_path / "one", asked), made(tmp_path / "other", asked, target=target)
    assert any(row[4] == "finished" for row in one)
    assert one == other


@gpu
@pytest.mark.parametrize("case", ["cnn6 in tf32", "cnn6 in bf16"])
def test_on_a_gpu_a_study_killed_and_continued_gives_the_same_bits(tmp_path, case):
    asked = ["compare", *CASES[case], *ON_GPU, "--epochs", "200"]
    whole, kills = made(tmp_path / "whole", asked), 0
    for _ in range(3):
        begin = times(tmp_path / "killed")
        child = Child(tmp_path / "killed", often, 0.2, *asked, patience=600)
        wait_for(lambda begin=begin: times(tmp_path / "killed").items() - begin.items(), child)
        child.kill()
        kills += child.ended().status == -signal.SIGKILL
    assert kills, "it was never killed"
    assert made(tmp_path / "killed", asked) == whole


@gpu
def test_on_a_gpu_a_backbone_taught_twice_has_the_same_bits(tmp_path):
    asked = ["pretrain", "--limit", "100", "--epochs", "3", "--lr", "0.02", "--shifts", "1", "--seeds", "2"]
    asked += ["--device", "cuda", "--deterministic", "--out", "b.safetensors"]
    for name in ("one", "other"):
        told = Child(tmp_path / name, command, *asked, patience=600).ended()
        assert told.status == 0, told.err
    for seed in (0, 1):
        one, other = (load_file(tmp_path / name / f"b-{seed}.safetensors") for name in ("one", "other"))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
