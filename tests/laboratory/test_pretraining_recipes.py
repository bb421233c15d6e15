"""Recipes of pre-training: their settings, overrides, and a folder of backbones that is filled once."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from laboratory.test_pretraining import SMALL, STREAM, StoppedError, content
from mooring.errors import MooringError
from mooring_lab.model.spec import rate_factor
from mooring_lab.streams.slices import limit_images
from mooring_lab.study.pretraining import RECIPES, Pretraining, pretrain, pretrain_missing, read_metadata
from mooring_lab.study.pretraining import settings_by_recipe as by_recipe

PLAN = by_recipe("paper", network="mlp", epochs=2, lr=0.05, batch=32, seeds=3)
NAMES = [f"mlp-paper-2-epochs-{seed}.safetensors" for seed in range(3)]


def trained_in(folder: Path, *plans: Pretraining, stream=SMALL) -> list[str]:
    """Return what was trained when a folder was filled."""
    trained: list[str] = []
    pretrain_missing(stream, plans, folder, report=lambda what, done, total: trained.append(what))
    return list(dict.fromkeys(trained))


def test_paper_recipe_has_the_learning_rates_and_augmentation_of_the_paper():
    spec = RECIPES["paper"].spec(0)
    steps = range(0, 60 * 7, 7)  # the first of each epoch
    rates = [spec.lr * rate_factor(spec.schedule, step, 60 * 7, spec.epochs) for step in steps]
    assert rates == pytest.approx([0.1] * 25 + [0.01] * 25 + [0.001] * 10)
    assert (spec.epochs, spec.batch, spec.momentum, spec.weight_decay) == (60, 128, 0.9, 1e-4)
    assert (spec.flips, spec.shifts) == (True, 0)


def test_strong_recipe_has_cosine_and_shifts():
    spec = RECIPES["strong"].spec(0)
    assert (spec.epochs, spec.lr, spec.schedule, spec.batch, spec.weight_decay) == (30, 0.05, "cosine", 128, 5e-4)
    assert (spec.flips, spec.shifts, spec.momentum) == (True, 4, 0.9)


def test_given_settings_override_the_recipe_and_missing_ones_do_not():
    settings = by_recipe("strong", epochs=5, flips=False, shifts=0, lr=None)
    assert settings == replace(RECIPES["strong"], epochs=5, flips=False, shifts=0)


def test_unknown_recipe_is_refused_with_the_allowed_names():
    with pytest.raises(
        MooringError, match=r"unknown recipe 'papers' \(did you mean 'paper'\?\); allowed: paper, strong"
    ):
        by_recipe("papers")


def test_file_says_recipe_data_and_accuracy(tmp_path):
    [backbone] = pretrain(SMALL, replace(PLAN, seeds=1), tmp_path / "b.safetensors")
    metadata = read_metadata(backbone.path)
    assert (metadata["recipe"], metadata["epochs"]) == ("paper", 2)
    assert metadata["accuracy"] == round(backbone.accuracy, 2)
    assert len(metadata["data"]) == 32


def test_accuracy_is_read_from_files_of_others_too(tmp_path):
    save_file({"w": torch.zeros(1)}, tmp_path / "other", metadata={"test_accuracy": "78.29"})
    save_file({"w": torch.zeros(1)}, tmp_path / "silent")
    save_file({"w": torch.zeros(1)}, tmp_path / "wrong", metadata={"mooring": json.dumps([1])})
    assert read_metadata(tmp_path / "other") == {"accuracy": 78.29}
    assert [read_metadata(tmp_path / name) for name in ("silent", "wrong", "missing")] == [{}, {}, {}]


def test_folder_is_filled_once(tmp_path):
    assert trained_in(tmp_path, PLAN) == ["pre-training mlp (paper, 2 epochs, seeds 0 to 2)"]
    assert sorted(path.name for path in tmp_path.iterdir()) == NAMES
    assert trained_in(tmp_path, PLAN) == []


def test_only_seeds_without_a_file_are_trained(tmp_path):
    trained_in(tmp_path, PLAN)
    before = content(tmp_path / NAMES[1])
    (tmp_path / NAMES[1]).unlink()
    assert trained_in(tmp_path, PLAN) == ["pre-training mlp (paper, 2 epochs, seed 1)"]
    assert content(tmp_path / NAMES[1])[1].keys() == before[1].keys()
    assert trained_in(tmp_path, replace(PLAN, seeds=5)) == ["pre-training mlp (paper, 2 epochs, seeds 3 to 4)"]


def test_one_seed_shares_its_file_with_several(tmp_path):
    trained_in(tmp_path, replace(PLAN, seeds=1))
    assert [path.name for path in tmp_path.iterdir()] == NAMES[:1]
    assert trained_in(tmp_path, PLAN) == ["pre-training mlp (paper, 2 epochs, seeds 1 to 2)"]


@pytest.mark.parametrize("change", ["learning rate", "data", "broken file"])
def test_file_of_other_settings_or_data_is_replaced(change, tmp_path):
    plan = replace(PLAN, seeds=1)
    trained_in(tmp_path, plan)
    if change == "broken file":
        (tmp_path / NAMES[0]).write_bytes(b"no weights")
    stream = limit_images(STREAM, 50) if change == "data" else SMALL
    wanted = replace(plan, lr=0.01) if change == "learning rate" else plan
    assert trained_in(tmp_path, wanted, stream=stream)
    assert read_metadata(tmp_path / NAMES[0])["lr"] == wanted.lr
    assert not trained_in(tmp_path, wanted, stream=stream)


def test_interrupted_call_continues_with_the_epoch_that_it_was_in(tmp_path):
    def stop(what: str, done: int, total: int | None) -> None:
        if done == total:
            raise StoppedError

    with pytest.raises(StoppedError):
        pretrain_missing(SMALL, [PLAN], tmp_path, report=stop)
    reports: list[int] = []
    pretrain_missing(SMALL, [PLAN], tmp_path, report=lambda what, done, total: reports.append(done))
    assert reports[0] > 0
    pretrain_missing(SMALL, [PLAN], tmp_path / "whole")
    for name in NAMES:
        assert content(tmp_path / name) == content(tmp_path / "whole" / name)


def test_kill_between_the_files_of_several_seeds_repeats_no_epoch(tmp_path, monkeypatch):
    from mooring_lab.model import atomic_files

    replace_file = atomic_files.os.replace

    def kill(source, target):
        if Path(target).name == NAMES[2]:
            raise KeyboardInterrupt
        replace_file(source, target)

    monkeypatch.setattr(atomic_files.os, "replace", kill)
    with pytest.raises(KeyboardInterrupt):
        pretrain_missing(SMALL, [PLAN], tmp_path)
    monkeypatch.undo()
    assert trained_in(tmp_path, PLAN) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == NAMES


def sometimes_dead(shape: tuple[int, ...]) -> nn.Module:
    """Return an MLP that starts at 0, where it cannot learn, for some seeds."""
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU())
    if torch.rand(()) < 0.4:
        for p in network.parameters():
            nn.init.zeros_(p)
    return network


def dead(shape: tuple[int, ...]) -> nn.Module:
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU())
    for p in network.parameters():
        nn.init.zeros_(p)
    return network


def test_seed_that_stays_at_chance_is_noted_and_replaced_by_the_next_one(tmp_path):
    plan = replace(PLAN, network=f"{__name__}:sometimes_dead", epochs=6, seed=1, seeds=3)
    notes: list[str] = []
    [files] = pretrain_missing(SMALL, [plan], tmp_path, note=notes.append)
    accuracies = [read_metadata(file)["accuracy"] for file in files]
    assert len(files) == 3
    assert min(accuracies) > 15
    assert notes
    assert all("stayed at chance (" in note for note in notes)
    assert len(list(tmp_path.iterdir())) == len(files) + len(notes)
    assert pretrain_missing(SMALL, [plan], tmp_path, report=pytest.fail) == [files]


def test_network_that_never_learns_is_refused_in_one_line(tmp_path):
    plan = replace(PLAN, network=f"{__name__}:dead", seeds=1)
    with pytest.raises(MooringError, match=r"2 of 2 seeds of .*dead stayed at chance when pre-trained: give another"):
        pretrain_missing(SMALL, [plan], tmp_path)
