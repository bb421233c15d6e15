"""The page: its header, the notes below tables, the cost and the command."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mooring.cli.paper_command import _cost_line, _portable_command
from mooring.lab.model.results import Result
from mooring.lab.model.spec import RunSpec
from mooring.lab.study.study import Study
from mooring.paper.context.paper_context import PaperContext
from mooring.paper.context.scale import PAPER
from mooring.paper.context.target_result import ResultTable, TargetResult
from mooring.paper.reproduction_page import page_header, write_page
from mooring.paper.targets import TARGETS, select_targets, training_cost


def run(method="plain", seed=0, **fields):
    spec = RunSpec("digits, trained", "ab" * 16, method, seed, **fields)
    versions = {"device": "NVIDIA H200", "torch": "2.0", "python": "3.11", "mooring": "0.1"}
    return Result(spec, "finished", "", [10.0], [[90.0]], steps=700, seconds=30.0, versions=versions)


@pytest.fixture
def data_folder(tmp_path):
    for name in ("cifar100", "flowers102"):
        (tmp_path / "data" / name).mkdir(parents=True)
    return tmp_path / "data"


def test_header_gives_models_iterations_time_and_device(fresh_context):
    header = page_header(fresh_context, [run(), run(seed=1), run(seed=2)], "mooring paper all")
    assert "3 models were trained (3 finished), 2,100 iterations" in header
    assert "1.5 minutes on NVIDIA H200" in header
    assert "Every run starts from random weights." in header
    assert "not yet run" not in header


def test_header_names_missing_data_sets(tmp_path, data_folder):
    context = PaperContext(Study(tmp_path / "p.sqlite"), PAPER.with_data(data_folder))
    header = page_header(context, [], "mooring paper all --data DIR")
    assert "caltech256: **not yet run**. Put it at `DIR/caltech256` in its public folder layout" in header
    assert "flowers102: **" not in header


def test_header_lists_backbones_with_the_metadata_of_their_files(tmp_path, data_folder):
    ours, theirs = tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors"
    metadata = {"mooring": json.dumps({"accuracy": 81.2, "stream": "cifar10, all at once"})}
    save_file({"w": torch.zeros(1)}, ours, metadata=metadata)
    save_file({"w": torch.ones(1)}, theirs)
    context = PaperContext(Study(tmp_path / "p.sqlite"), PAPER.with_data(data_folder), {"cnn6": [ours, theirs]})
    header = page_header(context, [], "mooring paper all")
    assert f"| cnn6 | ours.safetensors | {context.backbones['cnn6'][0]} | 81.20 | cifar10, all at once |" in header
    assert f"| cnn6 | theirs.safetensors | {context.backbones['cnn6'][1]} |  |  |" in header
    assert "| resnet18-third | none: random start |" in header


def test_notes_are_below_their_table(fresh_context, tmp_path):
    notes = ["ewc: accuracy differs by +1.00: not tested."]
    table = ResultTable("T", ["method"], [{"method": "ewc"}], notes=notes)
    results = [TargetResult("table1", tables=[table])]
    page = write_page(results, tmp_path / "out", fresh_context, command="mooring paper table1")
    assert "| ewc |\n\nWhy cells differ:\n\n- ewc: accuracy differs" in page.read_text()


def test_cost_counts_iterations_before_any_data_is_read():
    scale = replace(PAPER, streams={"cifar100": PAPER.streams["cifar100"]})
    roots = training_cost(select_targets(["roots"]), scale)["roots"]
    assert (roots.models, roots.steps) == (60, 60 * 7 * 500)
    grids = training_cost(select_targets(["grids"]), scale)["grids"]
    assert grids.steps == 350 * 3 * (500 + 30 * 20 + 500)  # two regimes, and the first for the second network
    assert "about 2.1e+05 iterations in total (roots 60)" in _cost_line(select_targets(["roots"]), scale)
    costs = training_cost(select_targets(["all"]), PAPER)
    assert all(cost.steps > 0 for name, cost in costs.items() if TARGETS[name].count(PAPER))


def test_command_on_the_page_has_no_local_folders(monkeypatch):
    words = ["paper", "all", "--data", "/here/data", "--init=/here/a.safetensors", "--init", "/here/b.safetensors"]
    monkeypatch.setattr(sys, "argv", ["mooring", *words])
    command = _portable_command(Path("/here/data"), [Path("/here/a.safetensors"), Path("/here/b.safetensors")])
    assert command == "mooring paper all --data DIR --init=a.safetensors --init b.safetensors"


def test_command_on_the_page_trains_instead_of_reading_results(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["mooring", "paper", "all", "--trained-on", "cuda"])
    assert _portable_command(None, []) == "mooring paper all --device cuda"
