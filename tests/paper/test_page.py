"""The page's head says what was trained, from what, and what was not; runs are a line each; the cost is told first."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mooring.cli.paper_command import _cost, _elsewhere
from mooring.lab.model.results import Result
from mooring.lab.model.spec import RunSpec
from mooring.lab.study.study import Study
from mooring.paper.context.context import Laboratory
from mooring.paper.context.result import Finding, Table
from mooring.paper.context.scale import MINIATURE, PAPER
from mooring.paper.page.cost import cost
from mooring.paper.page.page_header import head
from mooring.paper.page.reproduction_page import write_findings
from mooring.paper.page.runs_json import written
from mooring.paper.targets import TARGETS, chosen


def run(method: str = "plain", seed: int = 0, **told) -> Result:
    spec = RunSpec("digits, trained", "ab" * 16, method, seed, **told)
    made = {"device": "NVIDIA H200", "torch": "2.0", "python": "3.11", "mooring": "0.1"}
    return Result(spec, "finished", "", [10.0], [[90.0]], steps=700, seconds=30.0, versions=made)


@pytest.fixture
def folders(tmp_path) -> Path:
    for name in ("cifar100", "flowers102"):
        (tmp_path / "data" / name).mkdir(parents=True)
    return tmp_path


def test_the_head_says_how_many_models_how_long_and_on_what(tmp_path):
    lab = Laboratory(Study(tmp_path / "p.sqlite"), MINIATURE.on(None))
    told = head(lab, [run(), run(seed=1), run(seed=2)], "mooring paper all")
    assert "3 models were trained (3 finished), 2,100 iterations" in told
    assert "1.5 minutes on NVIDIA H200" in told
    assert "Every run starts from random weights." in told
    assert "not yet run" not in told


def test_a_data_set_that_is_not_there_is_not_yet_run(folders):
    lab = Laboratory(Study(folders / "p.sqlite"), PAPER.on(folders / "data"))
    told = head(lab, [], "mooring paper all --data DIR")
    assert "caltech256: **not yet run**. Put it at `DIR/caltech256` in its public folder layout" in told
    assert "flowers102: **" not in told


def test_backbones_are_told_with_what_their_files_say(folders):
    ours, theirs = folders / "ours.safetensors", folders / "theirs.safetensors"
    about = {"mooring": json.dumps({"accuracy": 81.2, "stream": "cifar10, all at once"})}
    save_file({"w": torch.zeros(1)}, ours, metadata=about)
    save_file({"w": torch.ones(1)}, theirs)
    scale = PAPER.on(folders / "data")
    lab = Laboratory(Study(folders / "p.sqlite"), scale, {"cnn6": [ours, theirs]})
    told = head(lab, [], "mooring paper all")
    assert f"| cnn6 | ours.safetensors | {lab.starts['cnn6'][0]} | 81.20 | cifar10, all at once |" in told
    assert f"| cnn6 | theirs.safetensors | {lab.starts['cnn6'][1]} |  |  |" in told
    assert "| resnet18-third | none: random start |" in told


def test_runs_are_a_short_line_each_without_what_is_usual():
    runs = [run("explicit-rwalk", seed, init="cd" * 16, lr=0.001, dtype="tf32") for seed in range(3)]
    runs.append(run(momentum=0.0, strength=1e-5, dtype="tf32"))
    lines = written(runs).decode().splitlines()
    rows = [json.loads(line.rstrip(",")) for line in lines if line.startswith('{"key"')]
    assert len(rows) == len(runs)
    assert max(map(len, lines)) < 400
    assert [row.get("momentum") for row in rows] == [None, None, None, 0.0]
    told = json.loads(written(runs))
    assert told["usual"]["momentum"] == 0.9
    assert told["streams"] == {"digits, trained": "ab" * 16}
    assert told["backbones"] == ["cd" * 16]
    assert {row.get("init") for row in told["runs"]} == {"cdcdcdcd", None}
    assert json.loads(written([]))["runs"] == []


def test_notes_stand_below_their_table(tmp_path):
    lab = Laboratory(Study(tmp_path / "p.sqlite"), MINIATURE.on(None))
    table = Table("T", ["method"], [{"method": "ewc"}], notes=["ewc: accuracy differs by +1.00: no reason found."])
    page = write_findings([Finding("table1", tables=[table])], tmp_path / "out", lab, command="mooring paper table1")
    assert "| ewc |\n\nWhy cells differ:\n\n- ewc: accuracy differs" in page.read_text()


def test_the_cost_counts_iterations_before_any_data_is_read():
    one = replace(PAPER, streams={"cifar100": PAPER.streams["cifar100"]})
    found = cost(chosen(["roots"]), one)["roots"]
    assert (found.models, found.steps) == (60, 60 * 7 * 500)
    searched = cost(chosen(["grids"]), one)["grids"]
    assert searched.steps == 350 * 3 * (500 + 30 * 20 + 500)  # two regimes, and the first for the second network
    assert "about 2.1e+05 iterations of one (roots 60)" in _cost(chosen(["roots"]), one)
    assert all(each.steps > 0 for name, each in cost(chosen(["all"]), PAPER).items() if TARGETS[name].count(PAPER))


def test_the_command_is_told_as_others_type_it(monkeypatch):
    words = ["paper", "all", "--data", "/here/data", "--init=/here/a.safetensors", "--init", "/here/b.safetensors"]
    monkeypatch.setattr(sys, "argv", ["mooring", *words])
    told = _elsewhere(Path("/here/data"), [Path("/here/a.safetensors"), Path("/here/b.safetensors")])
    assert told == "mooring paper all --data DIR --init=a.safetensors --init b.safetensors"


def test_who_has_no_results_yet_is_told_to_train(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["mooring", "paper", "all", "--trained-on", "cuda"])
    assert _elsewhere(None, []) == "mooring paper all --device cuda"
