"""Tests of determinism: a study run twice on one machine gives the same bits, whatever the global random state.

This holds on a CPU always, and on a GPU with --deterministic.
"""

import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from laboratory.faults.small import often, times
from laboratory.mooring_command import command
from laboratory.small import Once, class_stream, gpu, spec_for
from laboratory.test_kill import rows
from mooring.errors import MooringError
from mooring_lab.engines.checkpoint_index import CheckpointIndex
from mooring_lab.engines.engine import LocalEngine
from mooring_lab.engines.runner import RunContext
from mooring_lab.fleet.fleet import Fleet
from mooring_lab.model.precision import configure_cublas, deterministic
from mooring_lab.study.store import Store
from mooring_lab.study.study import Study
from processes import Child, wait_for

ALL_METHODS = ["compare", "--methods", "all", "--seeds", "2", "--limit", "20", "--tasks", "3", "--epochs", "1"]
ALL_METHODS += ["--batch", "5", "--memory", "8", "--study", "study.sqlite"]


def with_other_random_state(*arguments: str) -> int:
    """Run the command with another global random state."""
    import random

    import numpy
    import torch

    random.seed(7)
    numpy.random.seed(7)
    torch.manual_seed(7)
    torch.rand(1000)
    return command(*arguments)


def run_study(folder: Path, arguments: list[str], *more: str, target=command, patience=600) -> list[tuple]:
    """Run a study in its own process and return its rows."""
    ended = Child(folder, target, *arguments, *more, patience=patience).ended()
    assert ended.status == 0, ended.err
    return rows(folder)


def test_study_run_twice_gives_identical_results(tmp_path):
    from laboratory.test_determinism import with_other_random_state as target

    one = run_study(tmp_path / "one", ALL_METHODS, patience=240)
    other = run_study(tmp_path / "other", ALL_METHODS, target=target, patience=240)
    assert len(one) >= 2 * 40
    assert one == other


# --deterministic

FOUR_METHODS = ["compare", "--methods", "plain,er,explicit-mas,budget-kronecker", "--seeds", "2", "--limit", "20"]
FOUR_METHODS += ["--tasks", "3", "--epochs", "1", "--batch", "5", "--memory", "8", "--study", "study.sqlite"]


def versions(folder: Path) -> list[dict[str, str]]:
    return [result.versions for result in Store(folder / "study.sqlite").results()]


def test_deterministic_on_a_cpu_changes_no_bit_and_is_recorded(tmp_path):
    from laboratory.test_determinism import with_other_random_state as target

    one = run_study(tmp_path / "one", FOUR_METHODS)
    other = run_study(tmp_path / "other", FOUR_METHODS, "--deterministic", target=target)
    assert one == other
    assert {entry.get("deterministic") for entry in versions(tmp_path / "one")} == {None}
    assert {entry.get("deterministic") for entry in versions(tmp_path / "other")} == {"yes"}


def test_fleets_do_not_depend_on_finished_runs(tmp_path):
    stream = class_stream(tasks=2, images=8)
    specs = [spec_for("plain", stream, seed, epochs=1) for seed in range(10)]
    study = Study(tmp_path / "study.sqlite", fleet=4, deterministic=True)
    runner = LocalEngine(RunContext({stream.fingerprint: stream}, {}, deterministic=True), study.checkpoints)
    whole = study._plan_fleets(specs, runner, False, specs)
    assert [len(fleet) for fleet in whole] == [4, 3, 3]
    assert study._plan_fleets([*whole[0], *whole[2]], runner, False, specs) == [whole[0], whole[2]]
    assert study._plan_fleets(whole[1][1:], runner, False, specs) == [whole[1][1:]]


def test_deterministic_fleet_continues_only_from_a_checkpoint_of_the_same_runs(tmp_path):
    stream = class_stream(tasks=2, images=8)
    specs = [spec_for("plain", stream, seed, batch=4, epochs=1) for seed in range(4)]
    every = {same: CheckpointIndex(tmp_path, "cpu", False, deterministic=same) for same in (False, True)}
    for unfinished in every.values():
        Fleet(specs, stream).run(Once(unfinished.path([spec.key for spec in specs])))
    for same, unfinished in every.items():
        assert unfinished.sources(specs) == [unfinished.path([spec.key for spec in specs])]
        assert bool(unfinished.sources(specs[:2])) is not same  # a part of a fleet computes other bits


def test_nondeterministic_operation_or_setting_raises_a_one_line_error(monkeypatch):
    before = torch.get_deterministic_debug_mode()
    message = r"^put_ is not deterministic: leave --deterministic out"
    with pytest.raises(MooringError, match=message) as caught, deterministic():
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
def test_study_run_twice_on_a_gpu_gives_the_same_bits(tmp_path, case):
    from laboratory.test_determinism import with_other_random_state as target

    arguments = ["compare", *CASES[case], *ON_GPU]
    one, other = run_study(tmp_path / "one", arguments), run_study(tmp_path / "other", arguments, target=target)
    assert any(row[4] == "finished" for row in one)
    assert one == other


@gpu
@pytest.mark.parametrize("case", ["cnn6 in tf32", "cnn6 in bf16"])
def test_study_killed_and_continued_on_a_gpu_gives_the_same_bits(tmp_path, case):
    arguments = ["compare", *CASES[case], *ON_GPU, "--epochs", "200"]
    whole, kills = run_study(tmp_path / "whole", arguments), 0
    for _ in range(3):
        begin = times(tmp_path / "killed")
        child = Child(tmp_path / "killed", often, 0.2, *arguments, patience=600)
        wait_for(lambda begin=begin: times(tmp_path / "killed").items() - begin.items(), child)
        child.kill()
        kills += child.ended().status == -signal.SIGKILL
    assert kills, "it was never killed"
    assert run_study(tmp_path / "killed", arguments) == whole


@gpu
def test_backbone_pretrained_twice_on_a_gpu_has_the_same_bits(tmp_path):
    arguments = ["pretrain", "--limit", "100", "--epochs", "3", "--lr", "0.02", "--shifts", "1", "--seeds", "2"]
    arguments += ["--device", "cuda", "--deterministic", "--out", "b.safetensors"]
    for name in ("one", "other"):
        ended = Child(tmp_path / name, command, *arguments, patience=600).ended()
        assert ended.status == 0, ended.err
    for seed in (0, 1):
        one, other = (load_file(tmp_path / name / f"b-{seed}.safetensors") for name in ("one", "other"))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
