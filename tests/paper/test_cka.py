"""Likeness by layer: every method has its row, and balanced forms are judged against their plain forms."""

import math

import pytest

from mooring.lab.model.results import Result
from mooring.lab.model.spec import RunSpec
from mooring.lab.study.study import Study
from mooring.paper.context import seed_rows as rows
from mooring.paper.context.context import Laboratory
from mooring.paper.context.scale import MINIATURE, REGULARIZERS
from mooring.paper.figures import cka
from mooring.paper.tables import grid_search as grids
from paper.rendered import rendered


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return Laboratory(Study(tmp_path_factory.mktemp("cka") / "p.sqlite"), MINIATURE.on(None))


@pytest.fixture(scope="module")
def finding(lab):
    return cka.run(lab)


def made(method, deep, forgotten, status="finished"):
    """Runs whose deep layers have these CKAs, and that forget so much of the first of two tasks."""
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


def test_every_method_is_trained_and_has_a_row(lab, finding):
    assert finding.name == "fig-cka"
    assert len(finding.results) == cka.count(lab.scale) == 22
    searched = [result for result in lab.study.results() if result.spec.data == lab.searched("digits").fingerprint]
    assert len(lab.study.results()) == 22 + len(searched)
    layers, compared = finding.tables
    assert [row["method"] for row in layers.rows] == list(cka.METHODS)
    assert {"backbone.1", "backbone.3"} <= set(layers.columns)
    assert [row["importance"] for row in compared.rows] == list(REGULARIZERS)


def test_a_second_run_trains_nothing(lab, finding):
    before = len(lab.study.results())
    again = cka.run(lab)
    assert len(lab.study.results()) == before
    assert again.to_json() == finding.to_json()


def test_methods_have_the_settings_of_the_main_table(lab, finding):
    (case,) = rows.first_cases(lab.scale)
    settings = grids.found_settings(grids.search(lab, [case], REGULARIZERS)[case])
    assert settings
    for row in finding.tables[0].rows:
        if row["method"] in settings:
            assert float(row["lr"]) == settings[row["method"]].lr
            assert float(row["strength"]) == settings[row["method"]].strength


def test_a_balanced_form_has_the_setting_of_its_plain_form(finding):
    told = {row["method"]: row for row in finding.tables[0].rows}
    for name in REGULARIZERS:
        for dial in ("lr", "strength"):
            assert told[f"balanced-{name}"][dial] == told[name][dial]


def test_the_sentence_says_what_the_table_does(finding):
    compared = finding.tables[1].rows
    for column, words in (("deep CKA is higher", "more alike for"), ("forgets less", "it forgets less for")):
        known = [row for row in compared if row[column] is not None]
        assert f"{words} {sum(row[column] for row in known)} of {len(known)} definitions" in finding.text[0]


def test_it_can_be_drawn(finding):
    image = rendered(finding)
    assert image.name == "fig-cka-digits-layers"
    assert image.png.startswith(b"\x89PNG")


def test_nothing_is_drawn_where_nothing_finished():
    assert cka._draw({"x": {"ewc": made("ewc", [0.5], [1.0], "unstable")}}) == []


def test_what_is_surely_better_is_said_so():
    plain = made("ewc", [0.50, 0.52, 0.51], [10.0, 11.0, 12.0])
    balanced = made("balanced-ewc", [0.80, 0.81, 0.82], [5.0, 6.1, 7.0])
    row = cka._compared("ewc", plain, balanced)
    assert (row["deep CKA is higher"], row["surely higher"], row["forgets less"], row["surely less"]) == (True,) * 4
    (said,) = cka._said("x", [row])
    assert "more alike for 1 of 1 definitions (ewc), 1 of them beyond the 95 % interval" in said
    back = cka._compared("ewc", balanced, plain)
    assert not any((back["deep CKA is higher"], back["surely higher"], back["forgets less"], back["surely less"]))


def test_what_varies_too_much_is_better_but_not_surely():
    plain = made("ewc", [0.5, 0.5, 0.5], [10.0, 10.0, 10.0])
    row = cka._compared("ewc", plain, made("balanced-ewc", [0.9, 0.4, 0.5], [1.0, 12.0, 11.0]))
    assert (row["deep CKA is higher"], row["surely higher"], row["forgets less"], row["surely less"]) == (
        True,
        False,
        True,
        False,
    )


def test_one_seed_is_never_sure_and_none_is_nothing():
    one = cka._compared("ewc", made("ewc", [0.5], [9.0]), made("balanced-ewc", [0.9], [1.0]))
    assert (one["deep CKA is higher"], one["surely higher"]) == (True, None)
    none = cka._compared("ewc", made("ewc", [0.5], [9.0], "unstable"), made("balanced-ewc", [0.9], [1.0]))
    assert none["deep CKA"] is none["forgets less"] is None


def test_the_deeper_half_leaves_the_middle_out():
    (run,) = made("ewc", [0.4], [0.0])
    assert cka.deep(run) == 0.4
    assert math.isnan(cka.deep(made("ewc", [0.4], [0.0], "unstable")[0]))


def test_what_is_not_in_the_figure_is_named():
    assert cka._absent(["ewc", "si"], ["ewc"]) == " No seed of si finished."
    assert cka._absent(["ewc"], ["ewc"]) == ""
