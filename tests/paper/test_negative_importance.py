"""Case 1 of the paper's instability, in miniature."""

from dataclasses import replace

import pytest

from mooring_lab.model.results import Result
from mooring_lab.model.spec import RunSpec
from mooring_lab.model.summary import summarize
from mooring_lab.study.study import Study
from mooring_paper.context.paper_context import PaperContext, paper_setting
from mooring_paper.context.scale import MINIATURE, PAPER
from mooring_paper.figures import negative_importance


@pytest.fixture(scope="module")
def context(tmp_path_factory):
    scale = replace(MINIATURE.with_data(None), strengths=(1e4, 1.0, 1e3))  # unsorted, one of them unstable
    return PaperContext(Study(tmp_path_factory.mktemp("negative") / "p.sqlite"), scale)


@pytest.fixture(scope="module")
def result(context):
    return negative_importance.run(context)


def test_number_of_models_is_the_count_and_none_is_trained_twice(context, result):
    assert result.name == "fig-negative"
    assert len(result.results) == len(context.study.results()) == (4 * 3 + 1) * context.scale.seeds
    again = negative_importance.run(context)
    assert len(context.study.results()) == len(result.results)
    assert again.tables == result.tables


def test_every_variant_has_a_row_for_every_strength_in_order(result):
    (table,) = result.tables
    assert table.title == "mlp, 1-epoch, digits, lr 0.03"
    assert [(row["method"], row["strength"]) for row in table.rows] == [
        (name, strength) for name in negative_importance.VARIANTS for strength in ("1", "1000", "10000")
    ]
    assert all(list(row) == list(table.columns) for row in table.rows)


def test_table_matches_the_runs(result):
    for row in result.tables[0].rows:
        runs = [
            run
            for run in result.results
            if (run.spec.method, f"{run.spec.strength or 0:g}") == (row["method"], row["strength"])
        ]
        assert row["unstable"] == f"{sum(run.status == 'unstable' for run in runs)} of {len(runs)}"
        assert row["most below 0"] == max(stability.negative for run in runs for stability in run.stability)
        assert (row["accuracy"] is None) == all(run.status == "unstable" for run in runs)


def test_only_variants_with_signs_have_negative_scores(result):
    counts = {name: [] for name in negative_importance.VARIANTS}
    for row in result.tables[0].rows:
        counts[row["method"]].append(row["most below 0"])
    assert not any(counts["si-absolute"])
    assert any(counts["si-signed"])
    assert all(counts["si-flipped"])


def test_runs_are_the_same_if_all_common_accuracies_are():
    full = Result(RunSpec("digits", "0", "si", 0), "finished", "", [9.0] * 3, [[8, 1, 2], [7, 8, 3], [6, 7, 8]])
    short = replace(full, matrix=[row[: task + 2] for task, row in enumerate(full.matrix)])
    other = replace(short, matrix=[[8, 1], [7, 8, 3], [6, 7, 9]])
    unstable, earlier = (replace(short, status="unstable", matrix=short.matrix[:rows]) for rows in (2, 1))

    def same(one, two):
        return negative_importance._same_runs(*summarize([one]), *summarize([two]))

    assert same(full, short)
    assert same(short, full)
    assert not same(full, other)
    assert not same(short, unstable)
    assert not same(unstable, earlier)


def test_figure_is_drawn(result, render):
    image = render(result)
    assert image.name == "fig-negative-digits"
    assert image.png.startswith(b"\x89PNG")
    assert b"NaN" not in image.svg
    assert "3 strengths" in str(image.inline)


def test_learning_rate_is_the_papers():
    lrs = {condition.data: paper_setting(PAPER, condition, "si").lr for condition in PAPER.first_conditions()}
    assert lrs == {"cifar100": 0.001, "flowers102": 0.003, "caltech256": 0.001}
    assert paper_setting(MINIATURE, MINIATURE.first_conditions()[0], "si").lr == MINIATURE.lrs[0]


def test_text_gives_the_most_negative_scores_of_any_run_of_signed_si(result):
    stabilities = [run.stability for run in result.results if run.spec.method == "si-signed"]
    first = max(entry.negative for run in stabilities for entry in run[:1])
    later = max(entry.negative for run in stabilities for entry in run[1:])
    (text,) = result.text
    assert f"at most {first:,} are negative after the first task of a run, and at most {later:,} after later" in text
