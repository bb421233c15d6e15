"""CKA by layer: every method has a row, and balanced forms are compared with their plain forms."""

import math

import pytest

from mooring_lab.model.results import Result
from mooring_lab.model.spec import RunSpec
from mooring_paper.context.scale import REGULARIZERS
from mooring_paper.figures import cka
from mooring_paper.tables import grid_search

CLAIM_COLUMNS = ("deep CKA is higher", "surely higher", "forgets less", "surely less")


@pytest.fixture(scope="module")
def result(context):
    return cka.run(context)


def runs_with(method, deep, forgotten, status="finished"):
    """Runs with these CKAs in the deep layers that forget this much on average over two tasks."""
    return [
        Result(
            RunSpec("x", "0", method, seed),
            status,
            "",
            [0.0, 0.0],
            [[90.0, 0.0], [90.0 - 2 * lost, 80.0]],
            cka={"1": 1.0, "2": 0.9, "3": value, "4": value},
        )
        for seed, (value, lost) in enumerate(zip(deep, forgotten, strict=True))
    ]


def verdicts(row):
    return tuple(row[column] for column in CLAIM_COLUMNS)


def test_every_method_is_trained_and_has_a_row(context, result):
    assert result.name == "fig-cka"
    assert len(result.results) == 22
    stored = context.study.results()
    searched = [run for run in stored if run.spec.data == context.search_stream("digits").fingerprint]
    assert len(stored) == 22 + len(searched)
    layers, differences = result.tables
    assert [row["method"] for row in layers.rows] == list(cka.SETTING_SOURCES)
    assert {"backbone.1", "backbone.3"} <= set(layers.columns)
    assert [row["importance"] for row in differences.rows] == list(REGULARIZERS)


def test_second_run_trains_nothing(context, result):
    before = len(context.study.results())
    again = cka.run(context)
    assert len(context.study.results()) == before
    assert again.to_json() == result.to_json()


def test_methods_have_the_settings_of_the_main_table(context, result):
    (condition,) = context.scale.first_conditions()
    settings = grid_search.best_settings(grid_search.search(context, [condition], REGULARIZERS)[condition])
    assert settings
    for row in result.tables[0].rows:
        if row["method"] in settings:
            assert float(row["lr"]) == settings[row["method"]].lr
            assert float(row["strength"]) == settings[row["method"]].strength


def test_balanced_form_has_the_setting_of_its_plain_form(result):
    rows = {row["method"]: row for row in result.tables[0].rows}
    for name in REGULARIZERS:
        for column in ("lr", "strength"):
            assert rows[f"balanced-{name}"][column] == rows[name][column]


def test_figure_is_drawn(result, render):
    image = render(result)
    assert image.name == "fig-cka-digits-layers"
    assert image.png.startswith(b"\x89PNG")


def test_no_figure_without_finished_runs():
    assert cka._draw({"x": {"ewc": runs_with("ewc", [0.5], [1.0], "unstable")}}) == []


def test_significant_differences_are_reported():
    plain = runs_with("ewc", [0.50, 0.52, 0.51], [10.0, 11.0, 12.0])
    balanced = runs_with("balanced-ewc", [0.80, 0.81, 0.82], [5.0, 6.1, 7.0])
    row = cka._difference_row("ewc", plain, balanced)
    assert verdicts(row) == (True,) * 4
    assert not any(verdicts(cka._difference_row("ewc", balanced, plain)))


def test_differences_with_a_large_variance_are_not_significant():
    plain = runs_with("ewc", [0.5, 0.5, 0.5], [10.0, 10.0, 10.0])
    row = cka._difference_row("ewc", plain, runs_with("balanced-ewc", [0.9, 0.4, 0.5], [1.0, 12.0, 11.0]))
    assert verdicts(row) == (True, False, True, False)


def test_one_seed_has_no_significance_and_no_seed_has_no_difference():
    one = cka._difference_row("ewc", runs_with("ewc", [0.5], [9.0]), runs_with("balanced-ewc", [0.9], [1.0]))
    assert (one["deep CKA is higher"], one["surely higher"]) == (True, None)
    unstable = runs_with("ewc", [0.5], [9.0], "unstable")
    none = cka._difference_row("ewc", unstable, runs_with("balanced-ewc", [0.9], [1.0]))
    assert none["deep CKA"] is none["forgets less"] is None


def test_every_layer_is_shallow_or_deep():
    layers = {str(number): float(number) for number in range(5)}
    run = Result(RunSpec("digits", "0", "ewc", 0), "finished", "", [], [], cka=layers)
    assert (cka.shallow_cka(run), cka.deep_cka(run)) == (1.0, 3.5)
    assert math.isnan(cka.shallow_cka(Result(run.spec, "unstable", "", [], [], cka=layers)))


def test_deep_cka_leaves_out_the_first_half():
    (run,) = runs_with("ewc", [0.4], [0.0])
    assert cka.deep_cka(run) == 0.4
    assert math.isnan(cka.deep_cka(runs_with("ewc", [0.4], [0.0], "unstable")[0]))


def test_methods_missing_from_the_figure_are_named():
    assert cka._missing_note(["ewc", "si"], ["ewc"]) == " No seed of si finished."
    assert cka._missing_note(["ewc"], ["ewc"]) == ""
