"""Backbones of a reproduction: pre-trained by recipe unless given, kept next to the study, and continued."""

import io
import json
import signal
import sys
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from laboratory.one_line import refused
from laboratory.test_kill import killed_at
from mooring.errors import MooringError
from mooring_lab.cli import main
from mooring_lab.networks.initialization import read_weights
from mooring_lab.streams.options import open_stream
from mooring_lab.study import pretraining
from mooring_lab.study.pretraining import read_metadata
from mooring_lab.study.store import Store
from mooring_lab.study.study import Study
from mooring_paper.backbone_plan import plan_backbones
from mooring_paper.context.paper_context import PaperContext
from mooring_paper.context.scale import PAPER
from mooring_paper.paper_command import paper
from mooring_paper.targets import select_targets
from processes import Child

FOLDER = "mooring-backbones"
QUICK = ("paper", "fig-importance", "--miniature", "--seeds", "1")  # four models


@pytest.fixture
def run(tmp_path, capsys, monkeypatch):
    """Return a function that runs a command in an empty folder, and returns its stderr."""

    def run_command(*arguments: str) -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["mooring", *arguments])
        status = main()
        output = capsys.readouterr()
        assert status == 0, output.err
        return output.err

    return run_command


@pytest.fixture
def folder_without_cifar10(tmp_path):
    (tmp_path / "data" / "cifar100").mkdir(parents=True)
    return tmp_path / "data"


def planned(*names, recipe="paper", scale=PAPER, **options):
    plan = plan_backbones(select_targets(names), scale, recipe, **options)
    return [settings.description for settings in plan.backbones.values()], len(plan.levels)


def test_targets_get_backbones_for_the_networks_that_they_train():
    main_network, second = "cnn6 (paper, 60 epochs, seeds 0 to 4)", "resnet18-third (paper, 60 epochs, seeds 0 to 4)"
    of_the_code = "resnet18-quarter (paper, 60 epochs, seeds 0 to 4)"
    assert planned("all") == ([main_network, second, of_the_code], len(PAPER.levels))
    assert planned("as-published")[0] == [main_network, of_the_code]
    assert planned("roots") == ([main_network], 0)
    assert planned("effective-lr") == ([], 0), "it trains nothing"
    assert planned("fig-backbone") == ([], len(PAPER.levels)), "it starts from its own backbones"


def test_given_backbones_win_over_the_recipe():
    assert planned("resnet", given=["cnn6"])[0] == ["resnet18-third (paper, 60 epochs, seeds 0 to 4)"]
    assert planned("resnet", given=["cnn6", "resnet18-third"])[0] == []


def test_second_network_may_have_fewer_backbones():
    assert planned("resnet", recipe="strong", second_seeds=1)[0] == [
        "cnn6 (strong, 30 epochs, seeds 0 to 4)",
        "resnet18-third (strong, 30 epochs, seed 0)",
    ]


def test_recipe_none_pretrains_nothing():
    assert planned("all", recipe="none") == ([], 0)


def test_unknown_recipe_lists_none_too():
    with pytest.raises(MooringError, match="unknown recipe 'best'; allowed: paper, strong, none"):
        planned("all", recipe="best")


def test_missing_cifar10_is_refused_with_the_three_ways_out(folder_without_cifar10, tmp_path, capsys, monkeypatch):
    line = refused(tmp_path, ["paper", "table1", "--data", "data"], capsys, monkeypatch)
    assert "has no cifar10 to pre-train" in line
    for option in ("put it there", "--init", "--other-init", "--recipe none"):
        assert option in line


def test_missing_cifar10_does_not_matter_where_backbones_are_given(folder_without_cifar10):
    scale = PAPER.with_data(folder_without_cifar10)
    assert planned("as-published", scale=scale, given=["cnn6"]) == ([], 0)  # without the table of the code's ResNet
    assert planned("roots", "fig-backbone", scale=scale, given=["cnn6"]) == ([], 0)


def test_cifar10_is_read_from_the_data_folder(folder_without_cifar10):
    (folder_without_cifar10 / "cifar10").mkdir()
    scale = PAPER.with_data(folder_without_cifar10)
    assert scale.pretraining.data == str(folder_without_cifar10 / "cifar10")
    assert list(scale.streams) == ["cifar100"], "no target trains on it"


def test_both_networks_are_pretrained_on_cifar10_of_the_data_folder(tmp_path, folder_without_cifar10, monkeypatch):
    monkeypatch.setattr(pretraining, "is_at_chance", lambda accuracy, stream: False)  # nothing is learned from noise
    random, data = np.random.default_rng(0), folder_without_cifar10 / "cifar10" / "data"
    data.mkdir(parents=True)
    for kind in ("train", "test"):
        images = []
        for _ in range(10):
            buffer = io.BytesIO()
            Image.fromarray(random.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(buffer, "PNG")
            images.append({"bytes": buffer.getvalue(), "path": None})
        table = pa.table({"img": images, "label": list(range(10))})
        pq.write_table(table, data / f"{kind}-00000-of-00001.parquet")
    scale = replace(PAPER, seeds=2, levels=(("strong", 1),)).with_data(folder_without_cifar10)
    plan = plan_backbones(select_targets(["all"]), scale, "paper", second_seeds=1)
    shorter = {network: replace(settings, epochs=1) for network, settings in plan.backbones.items()}
    context = PaperContext(Study(tmp_path / "p.sqlite"), scale)
    replace(plan, backbones=shorter).pretrain(open_stream(scale.pretraining), context, tmp_path / FOLDER)
    counts = {network: len(starts) for network, starts in context.backbones.items()}
    assert counts == {"cnn6": 2, "resnet18-third": 1, "resnet18-quarter": 1}
    names = ["cnn6-paper-1-epoch-0", "cnn6-paper-1-epoch-1", "cnn6-strong-1-epoch-0"]
    names += ["resnet18-quarter-paper-1-epoch-0", "resnet18-third-paper-1-epoch-0"]
    assert sorted(path.stem for path in (tmp_path / FOLDER).iterdir()) == names
    assert len(context.levels) == 1


def test_paper_pretrains_its_backbones_once_and_lists_them(run, tmp_path):
    assert "pre-training mlp (paper, 60 epochs, seed 0)" in run(*QUICK)
    [file] = (tmp_path / FOLDER).iterdir()
    weights, metadata = read_weights(file), read_metadata(file)
    assert {result.spec.init for result in Store("mooring.sqlite").results()} == {weights.fingerprint}
    page = (tmp_path / "reproduction" / "index.md").read_text()
    assert all(text in page for text in (file.name, weights.fingerprint, f"{metadata['accuracy']:.2f}"))
    before = file.stat().st_mtime_ns
    progress = run(*QUICK)
    assert not any(text in progress for text in ("pre-training", "runs to train"))
    assert file.stat().st_mtime_ns == before


def test_given_backbone_and_recipe_none_pretrain_nothing(run, tmp_path):
    run("pretrain", "--network", "mlp", "--limit", "20", "--epochs", "1", "--out", "given.safetensors")
    given = read_weights(tmp_path / "given.safetensors").fingerprint
    run(*QUICK, "--init", "given.safetensors")
    run(*QUICK, "--recipe", "none")
    assert {result.spec.init for result in Store("mooring.sqlite").results()} == {given, ""}
    assert not (tmp_path / FOLDER).exists()


def test_killed_pretraining_continues_with_the_same_command(run, tmp_path, monkeypatch):
    assert Child(tmp_path, killed_at, 40, *QUICK).ended().status == -signal.SIGKILL
    name = "mlp-paper-60-epochs-0.safetensors"
    assert [path.name for path in (tmp_path / FOLDER).glob("mlp*")] == [f"{name}.partial"]
    begun: list[int] = []
    report = pretraining._EpochCheckpoints.report_progress

    def record(self, fleet):
        begun.append(fleet.steps)
        report(self, fleet)

    monkeypatch.setattr(pretraining._EpochCheckpoints, "report_progress", record)
    run(*QUICK)
    assert begun[0] > 0, "finished epochs are not repeated"
    run(*QUICK, "--study", "whole.sqlite")
    one, other = (read_weights(tmp_path / folder / name) for folder in (FOLDER, "whole-backbones"))
    assert one.fingerprint == other.fingerprint


def test_interrupted_pretraining_says_in_one_line_how_to_continue(tmp_path, monkeypatch, capsys):
    def stop(self, fleet):
        if fleet.steps == 5:
            signal.raise_signal(signal.SIGINT)
        self.report("pre-training", fleet.steps, self.steps)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pretraining._EpochCheckpoints, "report_progress", stop)
    assert main([*QUICK, "--quiet"]) == 130
    saved = "interrupted; every finished epoch is saved, and the same command continues from there\n"
    assert capsys.readouterr().err == saved


def test_every_option_of_the_command_is_explained_in_a_sentence():
    lines = {name: p.annotation.__metadata__[0].help for name, p in paper.__signature__.parameters.items()}
    assert {"recipe", "second_seeds"} <= lines.keys()
    assert not [name for name, line in lines.items() if not (line or "").endswith(".")]


def test_pretrain_command_overrides_its_recipe_and_says_its_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["--recipe", "strong", "--network", "mlp", "--limit", "20", "--epochs", "1", "--no-flips", "--json"]
    assert main(["pretrain", *words]) == 0
    output, metadata = json.loads(capsys.readouterr().out), read_metadata(tmp_path / "backbone.safetensors")
    assert output == {"backbone": "backbone.safetensors", "recipe": "strong", "seed": 0, "accuracy": output["accuracy"]}
    expected = {"recipe": "strong", "epochs": 1, "flips": False, "shifts": 4, "schedule": "cosine", "lr": 0.05}
    assert expected.items() <= metadata.items()
    assert metadata["accuracy"] == round(output["accuracy"], 2)
