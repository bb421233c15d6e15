"""Importance by layer: what the miniature finds, and that the sentences say what the tables do."""

import math

import pytest

from mooring.lab.model.results import Result
from mooring.lab.model.spec import RunSpec
from mooring.lab.study.study import Study
from mooring.paper.context.context import Laboratory
from mooring.paper.context.scale import MINIATURE, PAPER, REGULARIZERS, Case
from mooring.paper.figures import importance_by_layer as importance
from mooring.paper.published.published_numbers import Setting
from paper.rendered import rendered

LAYERS = [f"backbone.features.{place}" for place in (0, 2, 5, 7, 10, 12)]


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return Laboratory(Study(tmp_path_factory.mktemp("importance") / "p.sqlite"), MINIATURE.on(None))


@pytest.fixture(scope="module")
def finding(lab):
    return importance.run(lab)


def result(seed, **told):
    return Result(RunSpec("x", "0", "ewc", seed), told.pop("status", "finished"), "", [], [], **told)


def test_every_definition_is_trained_once_and_has_a_row(lab, finding):
    assert finding.name == "fig-importance"
    assert len(finding.results) == importance.count(lab.scale) == len(lab.study.results()) == 8
    (table,) = finding.tables
    assert [row["importance"] for row in table.rows] == list(REGULARIZERS)
    assert table.columns == ["importance", "backbone.1", "backbone.3", "last / first", "rank correlation with depth"]


def test_a_second_run_trains_nothing(lab, finding):
    before = len(lab.study.results())
    again = importance.run(lab)
    assert len(lab.study.results()) == before
    assert again.to_json() == finding.to_json()


def test_the_sentences_say_what_the_table_does(finding):
    rows = finding.tables[0].rows
    known = {row["importance"]: row["rank correlation with depth"] for row in rows}
    known = {name: order for name, order in known.items() if order is not None}
    falling = [name for name, order in known.items() if order < 0]
    assert f"for {len(falling)} of {len(known)} definitions ({', '.join(falling)})" in finding.text[0]
    for name, order in known.items():
        assert f"{name} {order:+.2f}" in finding.text[0]
    least = min((row for row in rows if row["last / first"] is not None), key=lambda row: row["last / first"])
    assert f"with {least['importance']}: {least['last / first']:.2g} of it" in finding.text[1]


def test_runs_that_did_not_finish_are_named_and_not_counted(finding):
    broken = {r.spec.method for r in finding.results if r.status != "finished"}
    empty = {row["importance"] for row in finding.tables[0].rows if row["last / first"] is None}
    assert empty == broken
    assert all(any(name in sentence for sentence in finding.text) for name in broken)


def test_it_can_be_drawn(finding):
    made = rendered(finding)
    assert made.name == "fig-importance-layers"
    assert made.png.startswith(b"\x89PNG")


def test_nothing_is_drawn_where_nothing_finished():
    assert importance._draw({"digits": {"ewc": {}}}) == []


def test_importance_is_relative_to_the_runs_own_mean_whatever_its_scale():
    falling = {layer: 10.0**-depth for depth, layer in enumerate(LAYERS)}
    scaled = {layer: 1e6 * value for layer, value in falling.items()}
    one = importance.relative([result(0, importance=falling)])
    both = importance.relative([result(0, importance=falling), result(1, importance=scaled)])
    for layer in LAYERS:
        assert both[layer].mean == pytest.approx(one[layer].mean)
        assert both[layer].std == pytest.approx(0, abs=1e-9)
    assert sum(10**told.mean for told in one.values()) == pytest.approx(len(LAYERS))


def test_layers_without_importance_and_unstable_runs_are_left_out():
    assert list(importance.relative([result(0, importance={"a": 1.0, "b": 0.0})])) == ["a"]
    assert importance.relative([result(0, status="unstable", importance={"a": math.nan, "b": 1.0})]) == {}


@pytest.mark.parametrize(
    ("values", "expected"), [([5.0, 4.0, 3.0], -1), ([1.0, 2.0, 2.0], 0.866025), ([1.0, 1.0, 1.0], None), ([1.0], None)]
)
def test_the_rank_correlation_is_spearmans(values, expected):
    found = importance.rank_correlation(list(range(len(values))), values)
    assert found == (None if expected is None else pytest.approx(expected, abs=1e-6))


def test_settings_are_the_papers_where_it_has_them():
    case = Case("cnn6", PAPER.regimes[0], "cifar100")
    assert importance.setting(PAPER, case, "ewc", "ewc") == Setting(0.001, 1000.0)
    assert importance.setting(PAPER, case, "balanced-ewc", "ewc") == Setting(0.001, 1000.0)
    assert importance.setting(PAPER, case, "plain", "explicit-ewc") == Setting(0.001, None)
    assert importance.setting(MINIATURE, MINIATURE.cases()[0], "mas", "mas").lr == MINIATURE.lrs[0]
