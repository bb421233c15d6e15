"""Importance by layer in miniature: the table, and sentences that match it."""

import math

import pytest

from mooring_lab.model.results import Result
from mooring_lab.model.spec import RunSpec
from mooring_paper.context.paper_context import paper_setting
from mooring_paper.context.scale import MINIATURE, PAPER, REGULARIZERS, Condition
from mooring_paper.figures import importance_by_layer
from mooring_paper.published.published_numbers import Setting

LAYERS = [f"backbone.features.{index}" for index in (0, 2, 5, 7, 10, 12)]


@pytest.fixture(scope="module")
def result(context):
    return importance_by_layer.run(context)


def run_with(seed, importance, status="finished"):
    return Result(RunSpec("x", "0", "ewc", seed), status, "", [], [], importance=importance)


def test_every_definition_is_trained_once_and_has_a_row(context, result):
    assert result.name == "fig-importance"
    assert len(result.results) == len(context.study.results()) == 8
    (table,) = result.tables
    assert [row["importance"] for row in table.rows] == list(REGULARIZERS)
    assert table.title.startswith("digits: mean importance by layer after the first task")
    assert {run.spec.data for run in result.results} == {context.first_task("digits").fingerprint}
    assert all(len(run.matrix) == 1 for run in result.results)
    assert table.columns == ["importance", "backbone.1", "backbone.3", "last / first", "rank correlation with depth"]


def test_second_run_trains_nothing(context, result):
    before = len(context.study.results())
    again = importance_by_layer.run(context)
    assert len(context.study.results()) == before
    assert again.to_json() == result.to_json()


def test_unfinished_runs_are_named_and_not_counted(result):
    broken = {run.spec.method for run in result.results if run.status != "finished"}
    empty = {row["importance"] for row in result.tables[0].rows if row["last / first"] is None}
    assert empty == broken


def test_runs_of_all_tasks_stand_in_where_nothing_else_is_stored(fresh_context, monkeypatch):
    monkeypatch.setattr(fresh_context, "has", lambda specs: "first task" not in specs[0].stream)
    runs, when = importance_by_layer.train_regularizers(fresh_context)
    assert when == "after all tasks"
    assert {run.spec.stream for run in runs["digits"]["ewc"]} == {"digits, trained"}


def test_figure_is_drawn(result, render):
    image = render(result)
    assert image.name == "fig-importance-layers"
    assert image.png.startswith(b"\x89PNG")


def test_no_figure_without_finished_runs():
    assert importance_by_layer._draw({"digits": {"ewc": {}}}, "") == []


def test_relative_importance_does_not_depend_on_the_scale_of_a_run():
    falling = {layer: 10.0**-depth for depth, layer in enumerate(LAYERS)}
    scaled = {layer: 1e6 * value for layer, value in falling.items()}
    one = importance_by_layer.relative_to_mean([run_with(0, falling)])
    both = importance_by_layer.relative_to_mean([run_with(0, falling), run_with(1, scaled)])
    for layer in LAYERS:
        assert both[layer].mean == pytest.approx(one[layer].mean)
        assert both[layer].std == pytest.approx(0, abs=1e-9)
    assert sum(10**value.mean for value in one.values()) == pytest.approx(len(LAYERS))


def test_layers_without_importance_and_unstable_runs_are_left_out():
    assert list(importance_by_layer.relative_to_mean([run_with(0, {"a": 1.0, "b": 0.0})])) == ["a"]
    assert importance_by_layer.relative_to_mean([run_with(0, {"a": math.nan, "b": 1.0}, status="unstable")]) == {}


@pytest.mark.parametrize(
    ("values", "expected"), [([5.0, 4.0, 3.0], -1), ([1.0, 2.0, 2.0], 0.866025), ([1.0, 1.0, 1.0], None), ([1.0], None)]
)
def test_rank_correlation_is_spearmans(values, expected):
    order = importance_by_layer.rank_correlation(list(range(len(values))), values)
    assert order == (None if expected is None else pytest.approx(expected, abs=1e-6))


def test_settings_are_the_papers_if_it_has_them():
    condition = Condition("cnn6", PAPER.regimes[0], "cifar100")
    assert paper_setting(PAPER, condition, "ewc") == Setting(0.001, 1000.0)
    assert paper_setting(PAPER, condition, "balanced-ewc", "ewc") == Setting(0.001, 1000.0)
    assert paper_setting(PAPER, condition, "plain", "explicit-ewc") == Setting(0.001, None)
    assert paper_setting(MINIATURE, MINIATURE.conditions()[0], "mas").lr == MINIATURE.lrs[0]
