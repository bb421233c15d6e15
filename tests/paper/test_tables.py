"""The grid search, the tables and the command, in miniature."""

import json
import sys
from dataclasses import replace

import pytest

from mooring.errors import MooringError
from mooring_lab.cli import main
from mooring_lab.model.metrics import confidence_interval
from mooring_lab.model.results import Result
from mooring_lab.model.spec import RunSpec
from mooring_lab.networks.initialization import initial_network
from mooring_lab.streams.options import open_stream
from mooring_lab.study.study import Study
from mooring_paper.context.paper_context import MissingRuns, PaperContext, paper_setting
from mooring_paper.context.scale import CONTROLS, MINIATURE, PAPER, PUBLISHED_CODE, ROWS
from mooring_paper.context.target_result import means_agree
from mooring_paper.published.published_numbers import Setting, published, published_setting
from mooring_paper.tables import accuracy_tables, as_published, grid_search
from mooring_paper.targets import TARGETS, select_targets
from paper.stored import STORED, StoredPage

SETTINGS = 2 * 2 * (6 * 3 + 10)
"""Of the miniature's grid: two regimes, two learning rates, three strengths for six methods, and ten without one."""


@pytest.fixture(scope="module")
def grids(context):
    return grid_search.run(context)


@pytest.fixture(scope="module")
def table1(context):
    return accuracy_tables.table1(context)


def test_search_tries_every_setting_of_every_method_once(context, grids):
    assert len(grids.results) == SETTINGS
    assert {run.spec.seed for run in grids.results} == {0}
    assert {run.spec.data for run in grids.results} == {context.search_stream("digits").fingerprint}
    for table in grids.tables:
        assert [row["method"] for row in table.rows] == [*ROWS, *CONTROLS]


def test_search_chooses_the_most_accurate_setting_that_finished(context):
    condition = context.scale.conditions()[0]
    for choice in grid_search.search(context, [condition])[condition]:
        finished = [row for row in choice.grid if not row.unfinished]
        assert choice.best is not None
        assert choice.best.metrics["accuracy"].mean == max(row.metrics["accuracy"].mean for row in finished)


def test_search_drops_penalties_that_would_extrapolate(grids):
    dropped = {row["method"] for table in grids.tables for row in table.rows if row["dropped"]}
    assert dropped
    assert dropped <= {"ewc", "mas", "si", "rwalk", "uniform", "random"}


def test_table_has_every_method_and_control_on_the_tasks_after_the_searched_ones(context, table1):
    assert {run.spec.data for run in table1.results} == {context.main_stream("digits").fingerprint}
    ours = [table for table in table1.tables if table.title.endswith("at our settings")]
    assert len(ours) == len(context.scale.conditions())
    for table in ours:
        assert [row["method"].split()[0] for row in table.rows] == [*ROWS, *CONTROLS]
    assert {run.spec.seed for run in table1.results} == set(range(context.scale.seeds))


def test_second_run_trains_nothing(context, grids, table1):
    before = len(context.study.results())
    again = [grid_search.run(context), accuracy_tables.table1(context)]
    assert len(context.study.results()) == before
    assert [result.to_json() for result in again] == [grids.to_json(), table1.to_json()]


def test_results_and_streams_are_read_once(context, table1, monkeypatch):
    expected = accuracy_tables.table1(context).to_json()
    monkeypatch.setattr(context.study, "run", None)
    monkeypatch.setattr(context.study, "open", None)
    assert accuracy_tables.table1(context).to_json() == expected
    assert context.main_stream("digits") is context.main_stream("digits")


def test_seeds_take_the_backbones_in_turn(tmp_path):
    from safetensors.torch import save_file

    stream = open_stream(MINIATURE.streams["digits"])
    paths = [tmp_path / f"{seed}.safetensors" for seed in (0, 1)]
    for seed, path in enumerate(paths):
        save_file(initial_network("mlp", stream, seed).backbone.state_dict(), path)
    context = PaperContext(Study(tmp_path / "p.sqlite"), MINIATURE.with_data(None), {"mlp": paths})
    condition = MINIATURE.conditions()[0]
    specs = [context.spec(condition, "plain", seed, Setting(0.01, None)) for seed in range(4)]
    assert specs[0].init == specs[2].init != specs[1].init == specs[3].init
    assert all(spec.init for spec in specs)
    [runs] = accuracy_tables.runs_at_our_settings(context, [condition], ["plain"]).values()
    stored = {run.spec.key for run in context.study.results()}
    assert {run.spec.key for run in runs} <= stored  # the runs with their backbones


def test_published_numbers_are_found_by_our_names():
    assert published("cnn6", "30-epochs", "flowers102", "uniform").accuracy == 60.3
    assert published_setting("cnn6", "30-epochs", "cifar100", "rwalk") == Setting(0.003, 0.001)
    assert published_setting("resnet18-third", "1-epoch", "cifar100", "ewc") is not None
    for condition in PAPER.conditions():
        assert all(published(condition.network, condition.regime.name, condition.data, name) for name in ROWS)


def test_means_agree_if_their_difference_can_be_chance():
    ours = confidence_interval([60.0, 61.0, 62.0, 61.0, 61.0])
    assert means_agree(ours, 61.5, 0.7)
    assert not means_agree(ours, 63.0, 0.7)
    assert means_agree(confidence_interval([61.0]), 61.0, 0.7) is None
    constant = confidence_interval([61.0] * 5)
    assert means_agree(constant, 61.0, 0.0)
    assert not means_agree(constant, 61.1, 0.0)


def test_paper_scale_has_the_papers_grid():
    strengths = [len(grid_search._strengths(PAPER, method)) for method in grid_search.SEARCHED_METHODS]
    assert len(PAPER.lrs) * sum(strengths) == 350  # 335 settings of the paper's rows, and 15 of the controls
    assert [target.name for target in select_targets(["all"])] == list(TARGETS)


def test_stream_with_too_few_tasks_is_refused(tmp_path):
    scale = replace(MINIATURE, search_tasks=5).with_data(None)
    context = PaperContext(Study(tmp_path / "p.sqlite"), scale)
    with pytest.raises(MooringError, match="give a stream with more tasks"):
        context.main_stream("digits")


def test_caltech_256_is_read_from_its_public_folder_layout(tmp_path):
    """A small tree of class folders, with the clutter that is left out."""
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
    # More classes in a task, because a stream with fewer classes than the data set is refused.
    streams = {"caltech256": replace(PAPER.streams["caltech256"], per_task=8)}
    scale = replace(PAPER, network="mlp", second_network="mlp", regimes=PAPER.regimes[:1], streams=streams, seeds=1)
    scale = replace(scale, lrs=(0.01,), strengths=(1e-3,)).with_data(tmp_path / "data")
    context = PaperContext(Study(tmp_path / "p.sqlite"), scale)
    result = accuracy_tables.table1(context)
    assert len(context.main_stream("caltech256").tasks) == 32 // 8 - 3
    assert {run.status for run in result.results} <= {"finished", "unstable"}
    ours = next(table for table in result.tables if table.title.endswith("at our settings"))
    explicit = next(row for row in ours.rows if row["method"] == "explicit-mas")
    assert explicit["paper's accuracy"] is None  # the paper's is that of cnn6


# The command


def run_command(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["mooring", "paper", *arguments])
    status = main()
    return status, capsys.readouterr()


def test_command_prints_how_many_runs_it_trains_and_writes_the_page(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    status, output = run_command(monkeypatch, capsys, "grids", "--miniature", "--seeds", "1", "--json")
    assert status == 0, output.err
    assert f"{SETTINGS} runs to train" in output.err
    assert [result["target"] for result in json.loads(output.out)["findings"]] == ["grids"]
    page = (tmp_path / "reproduction" / "index.md").read_text()
    assert f"<summary>grids: {TARGETS['grids'].summary}</summary>" in page
    assert f"The search tried {SETTINGS} settings" in page
    content = (tmp_path / "reproduction" / "runs.json").read_text()
    runs = json.loads(content)["runs"]
    assert len(runs) == SETTINGS
    assert {run["status"] for run in runs} == {"finished", "rejected"}
    assert sum(line.startswith('{"key"') for line in content.splitlines()) == len(runs)


@pytest.mark.faults  # slow
def test_command_adds_seeds(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    options = ["--miniature", "--max-seeds", "4", "--json"]
    status, output = run_command(monkeypatch, capsys, "claims", "grids", *options)
    assert status == 0, output.err
    claims, grids = json.loads(output.out)["findings"]
    assert {row["seeds"] for table in claims["tables"] for row in table["rows"]} == {"", "2", "2 to 4", "4"}
    runs = {run["key"]: run for run in json.loads((tmp_path / "reproduction" / "runs.json").read_text())["runs"]}
    assert {*claims["runs"], *grids["runs"]} <= set(runs)
    assert {runs[key]["seed"] for key in grids["runs"]} == {0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["claims", "--miniature", "--max-seeds", "1"], "--max-seeds 1 is less than the 2 seeds of every cell"),
        (["table9", "--miniature"], "unknown target 'table9'"),
        (["all"], "give --data, or --miniature"),
        (["all", "--data", "nowhere"], "nowhere has no folder cifar100"),
        (["all", "--miniature", "--sets", "cifar100"], "unknown data set 'cifar100'"),
    ],
)
def test_invalid_arguments_are_refused_in_one_line(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    status, output = run_command(monkeypatch, capsys, *arguments)
    assert status == 2
    assert message in output.err
    assert len(output.err.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


# The authors' public code


def test_methods_as_published_have_the_runs_and_cells_of_their_textbook_forms(context):
    result = as_published.run(context)
    assert [table.title for table in result.tables] == [f"{c}, as published" for c in context.scale.conditions()]
    for table in result.tables:
        assert [row["method"].split()[0] for row in table.rows] == [f"{name}-as-published" for name in PUBLISHED_CODE]
    for run in result.results:
        method = run.spec.method.removesuffix("-as-published")
        condition = next(c for c in context.scale.conditions() if c.regime.epochs == run.spec.epochs)
        setting = paper_setting(context.scale, condition, method)
        assert (run.spec.lr, run.spec.strength) == (setting.lr, setting.strength)


def test_cells_as_published_are_compared_with_the_papers_under_their_textbook_names():
    condition = PAPER.conditions()[0]
    runs = [
        Result(RunSpec("cifar100", "0", "rwalk-as-published", seed, strength=1e-4), "finished", "", [10.0], [[value]])
        for seed, value in enumerate((63.0, 64.0, 65.0))
    ]
    table = accuracy_tables.condition_table(condition, runs, accuracy_tables.AS_PUBLISHED)
    accuracy, _ = table.cells
    assert (accuracy.method, accuracy.mean) == ("rwalk", 63.9)
    assert accuracy.differs is False
    assert table.rows[0]["paper's accuracy"].startswith("63.9")


def test_widths_of_the_published_resnet_are_trained_if_there_are_backbones(data_context):
    data_context.has, data_context.defers_training = lambda specs: True, True
    data_context.backbones["resnet18-quarter"] = ["ab" * 16]
    with pytest.raises(MissingRuns) as request:
        as_published.run(data_context)
    quarter = [spec for spec in request.value.specs if spec.network == "resnet18-quarter"]
    third = [s for c in PAPER.second_conditions()[:2] for s in accuracy_tables.second_specs(data_context, c)]
    assert quarter == [replace(spec, network="resnet18-quarter", init="ab" * 16) for spec in third]
    assert len(request.value.specs) == len(quarter) + 4 * 10 * 5  # conditions, methods and seeds


def test_plain_resnet_takes_a_rate_below_ewcs_where_it_has_runs(data_context):
    condition = PAPER.second_conditions()[0]
    assert not data_context.has(data_context.seed_specs(condition, "plain", Setting(0.001, None)))
    rates = {spec.method: spec.lr for spec in accuracy_tables.second_specs(data_context, condition)}
    assert rates["plain"] == rates["explicit-ewc"] == 0.01
    data_context.has = lambda specs: True  # as a context that trains says of all
    rates = {spec.method: spec.lr for spec in accuracy_tables.second_specs(data_context, condition)}
    assert rates["plain"] == 0.001 < rates["ewc"] == 0.003


@pytest.fixture
def data_context(tmp_path):
    """The scale of the paper, with the streams of a stored page."""
    return StoredPage.read(STORED).context(Study(tmp_path / "p.sqlite"))


def test_rows_outside_of_the_papers_own_bound_are_named_with_the_seeds_that_are_stable(data_context):
    """Uniform importance at lr 0.003 and strength 1000: lr * strength * importance is 3 everywhere."""
    text = accuracy_tables.table1(data_context).text
    assert len(text) == 2
    assert "uniform 1000 on flowers102 in 1-epoch is outside of" in text[0]
    assert "(up to 3 after the first task), and stable in 4 of 5 seeds." in text[0]
