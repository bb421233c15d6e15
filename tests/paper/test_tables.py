"""The paper's grid search and tables in miniature: what they train, what they say; nothing is trained twice."""

import json
import sys

import pytest

from mooring.cli import main
from mooring.errors import MooringError
from mooring.lab.model.metrics import confidence_interval
from mooring.lab.model.results import Result
from mooring.lab.model.spec import RunSpec
from mooring.lab.model.summary import summarize
from mooring.lab.study.study import Study
from mooring.paper.context.cell import agrees
from mooring.paper.context.context import Laboratory
from mooring.paper.context.scale import CONTROLS, MINIATURE, PAPER, ROWS
from mooring.paper.published.published_numbers import Setting, published, published_setting
from mooring.paper.tables import accuracy_tables as tables
from mooring.paper.tables import grid_search as grids
from mooring.paper.targets import TARGETS, chosen


@pytest.fixture(scope="module")
def lab(tmp_path_factory) -> Laboratory:
    return Laboratory(Study(tmp_path_factory.mktemp("paper") / "paper.sqlite"), MINIATURE.on(None))


@pytest.fixture(scope="module")
def searched(lab):
    return grids.run(lab)


@pytest.fixture(scope="module")
def table(lab):
    return tables.table1(lab)


def test_the_search_tries_every_setting_of_every_method_once(lab, searched):
    assert len(searched.results) == grids.count(lab.scale)
    assert {result.spec.seed for result in searched.results} == {0}
    assert {result.spec.data for result in searched.results} == {lab.searched("digits").fingerprint}
    for shown in searched.tables:
        assert [row["method"] for row in shown.rows] == [*ROWS, *CONTROLS]


def test_the_search_chooses_the_most_accurate_setting_of_those_that_finished(lab):
    case = lab.scale.cases()[0]
    for choice in grids.search(lab, [case])[case]:
        finished = [row for row in choice.grid if not row.unfinished]
        assert choice.best is not None
        assert choice.best.metrics["accuracy"].mean == max(row.metrics["accuracy"].mean for row in finished)


def test_a_penalty_that_would_extrapolate_is_dropped_in_the_search(searched):
    dropped = {row["method"] for shown in searched.tables for row in shown.rows if row["dropped"]}
    assert dropped
    assert dropped <= {"ewc", "mas", "si", "rwalk", "uniform", "random"}


def test_the_table_has_every_method_and_control_on_the_tasks_that_were_not_searched(lab, table):
    assert {result.spec.data for result in table.results} == {lab.trained("digits").fingerprint}
    ours = [shown for shown in table.tables if shown.title.endswith("at our settings")]
    assert len(ours) == len(lab.scale.cases())
    for shown in ours:
        assert [row["method"].split()[0] for row in shown.rows] == [*ROWS, *CONTROLS]
    assert len(table.results) <= tables.count_table1(lab.scale)
    assert {result.spec.seed for result in table.results} == set(range(lab.scale.seeds))


def test_methods_that_are_not_surely_better_than_a_control_are_named(table):
    """Freezing does well on so easy a stream."""
    assert any("cannot be told to be more accurate than frozen." in line for line in table.text)


def test_cells_that_cannot_be_judged_are_counted_by_why():
    def told(accuracy, paper, agrees):
        both = {"accuracy": accuracy, "paper's accuracy": paper, "accuracy agrees": agrees}
        return {**both, "forgetting": "1.00 ± 0.10", "paper's forgetting": "1 ± 0.1", "forgetting agrees": True}

    cells = [told("60.00 ± 1.00", None, None), told(None, "60 ± 1", None), told("60.00 ± 1.00", "60", None)]
    (line,) = tables._said(cells, [])
    assert line.startswith("3 of 3 cells agree")
    for why in ("the paper has no number", "no run of ours finished", "there is no standard deviation"):
        assert f"; for 1 {why}" in line


def test_a_setting_that_the_paper_does_not_name_is_told(lab):
    (told,) = tables._of_plain(PAPER.cases()[:1])
    assert "does not name plain fine-tuning's setting: here it has the explicit step's learning rate" in told
    assert tables._of_plain(lab.scale.cases()) == []  # of digits it names nothing


def test_of_one_seed_nothing_is_said():
    specs = [RunSpec("digits", "0", method, 0) for method in ("frozen", "plain")]
    rows = summarize(Result(spec, "finished", "", [10.0], [[90.0]]) for spec in specs)
    assert tables._beaten("digits", rows) == []


def test_asked_again_nothing_is_trained(lab, searched, table):
    before = len(lab.study.results())
    again = [grids.run(lab), tables.table1(lab)]
    assert len(lab.study.results()) == before
    assert [finding.to_json() for finding in again] == [searched.to_json(), table.to_json()]


def test_what_was_read_once_is_not_read_again(lab, table, monkeypatch):
    """Targets share their runs and their streams: a second look costs nothing."""
    usual = tables.table1(lab).to_json()
    monkeypatch.setattr(lab.study, "run", None)
    monkeypatch.setattr(lab.study, "open", None)
    assert tables.table1(lab).to_json() == usual
    assert lab.trained("digits") is lab.trained("digits")


def test_seeds_take_the_backbones_in_turn(tmp_path):
    from safetensors.torch import save_file

    from mooring.lab.networks.initialization import initial_network
    from mooring.lab.streams.options import open_stream

    stream = open_stream(MINIATURE.streams["digits"])
    paths = [tmp_path / f"{seed}.safetensors" for seed in (0, 1)]
    for seed, path in enumerate(paths):
        save_file(initial_network("mlp", stream, seed).backbone.state_dict(), path)
    lab = Laboratory(Study(tmp_path / "p.sqlite"), MINIATURE.on(None), {"mlp": paths})
    specs = [lab.spec(MINIATURE.cases()[0], "plain", seed, Setting(0.01, None)) for seed in range(4)]
    assert specs[0].init == specs[2].init != specs[1].init == specs[3].init
    assert all(spec.init for spec in specs)
    [[row]] = tables.rows_at_our_settings(lab, MINIATURE.cases()[:1], ["plain"]).values()
    kept = {result.spec.key for result in lab.study.results()}
    assert {result.spec.key for result in row.results} <= kept  # a run with its backbone, and no other run without


def test_the_papers_numbers_are_found_by_our_names():
    assert published("cnn6", "30-epochs", "flowers102", "uniform").accuracy == 60.3
    assert published_setting("cnn6", "30-epochs", "cifar100", "rwalk") == Setting(0.003, 0.001)
    assert published_setting("resnet18-third", "1-epoch", "cifar100", "ewc") is not None
    for case in PAPER.cases():
        assert all(published(case.network, case.regime.name, case.data, name) for name in ROWS)


def test_two_means_agree_where_their_difference_could_be_chance():
    ours = confidence_interval([60.0, 61.0, 62.0, 61.0, 61.0])
    assert agrees(ours, 61.5, 0.7)
    assert not agrees(ours, 63.0, 0.7)
    assert agrees(confidence_interval([61.0]), 61.0, 0.7) is None
    same = confidence_interval([61.0] * 5)
    assert agrees(same, 61.0, 0.0)
    assert not agrees(same, 61.1, 0.0)


def test_the_paper_scale_is_the_papers():
    assert grids.count(PAPER) == 3 * 3 * 350  # 335 settings of the paper's rows, and 15 of the controls
    assert [target.name for target in chosen(["all"])] == list(TARGETS)


# The command


def asked(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["mooring", "paper", *arguments])
    status = main()
    return status, capsys.readouterr()


def test_the_command_says_the_cost_first_and_writes_the_page(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    status, told = asked(monkeypatch, capsys, "grids", "--miniature", "--seeds", "1", "--json")
    assert status == 0, told.err
    assert told.err.startswith(f"at most {grids.count(MINIATURE)} models on digits")
    found = json.loads(told.out)
    assert [finding["target"] for finding in found["findings"]] == ["grids"]
    page = (tmp_path / "reproduction" / "index.md").read_text()
    assert "## grids: " in page
    assert "| explicit-mas |" in page
    written = (tmp_path / "reproduction" / "runs.json").read_text()
    runs = json.loads(written)["runs"]
    assert len(runs) == grids.count(MINIATURE)
    assert {run["status"] for run in runs} == {"finished", "rejected"}
    assert sum(line.startswith('{"key"') for line in written.splitlines()) == len(runs)  # a line for each


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["table9", "--miniature"], "unknown target 'table9'"),
        (["all"], "give --data, or --miniature"),
        (["all", "--data", "nowhere"], "nowhere has no folder cifar100"),
        (["all", "--miniature", "--sets", "cifar100"], "unknown data set 'cifar100'"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(arguments, line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    status, told = asked(monkeypatch, capsys, *arguments)
    assert status == 2
    assert line in told.err
    assert len(told.err.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_stream_with_too_few_tasks_is_refused(tmp_path):
    from dataclasses import replace

    lab = Laboratory(Study(tmp_path / "p.sqlite"), replace(MINIATURE, search_tasks=5).on(None))
    with pytest.raises(MooringError, match="some must be left"):
        lab.trained("digits")


def test_caltech_256_runs_from_the_public_folder_layout(tmp_path):
    """A small tree of class folders, with the clutter that is left out."""
    from dataclasses import replace

    import numpy as np
    from PIL import Image

    random = np.random.default_rng(0)
    names = [f"{number:03d}.thing-{number}" for number in range(1, 33)] + ["257.clutter"]
    for name in names:
        folder = tmp_path / "data" / "caltech256" / name
        folder.mkdir(parents=True)
        for image in range(5):
            pixels = random.integers(0, 256, (20, 24, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{name[:3]}_{image:04d}.jpg")
    small = {"network": "mlp", "other": "mlp", "regimes": PAPER.regimes[:1], "lrs": (0.01,), "strengths": (1e-3,)}
    few = {"caltech256": replace(PAPER.streams["caltech256"], per_task=8)}  # fewer classes than it has are refused
    scale = replace(PAPER, **small, streams=few, seeds=1).on(tmp_path / "data")
    lab = Laboratory(Study(tmp_path / "p.sqlite"), scale)
    finding = tables.table1(lab)
    assert len(lab.trained("caltech256").tasks) == 32 // 8 - 3
    assert {result.status for result in finding.results} <= {"finished", "unstable"}
    ours = next(shown for shown in finding.tables if shown.title.endswith("at our settings"))
    assert next(row for row in ours.rows if row["method"] == "explicit-mas")["paper's accuracy"] is None  # of a cnn6
