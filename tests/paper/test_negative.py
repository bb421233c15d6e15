"""Case 1 of the paper's instability, in miniature."""

from dataclasses import replace
from pathlib import Path

import pytest

from mooring.lab.model.results import Result
from mooring.lab.model.spec import RunSpec
from mooring.lab.model.summary import summarize
from mooring.lab.study.study import Study
from mooring.paper.context.context import Laboratory
from mooring.paper.context.result import Finding
from mooring.paper.context.scale import MINIATURE, PAPER
from mooring.paper.figures import negative_importance as negative
from mooring.report.picture import picture
from mooring.report.style import drawing


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Laboratory:
    scale = replace(MINIATURE.on(None), strengths=(1e4, 1.0, 1e3))  # a strength that is unstable, in no order
    return Laboratory(Study(tmp_path_factory.mktemp("negative") / "p.sqlite"), scale)


@pytest.fixture(scope="module")
def finding(lab: Laboratory) -> Finding:
    return negative.run(lab)


def test_it_trains_as_many_models_as_it_says_and_none_twice(lab: Laboratory, finding: Finding) -> None:
    assert finding.name == "fig-negative"
    assert len(finding.results) == len(lab.study.results()) == negative.count(lab.scale)
    again = negative.run(lab)
    assert len(lab.study.results()) == len(finding.results)
    assert again.text == finding.text
    assert again.tables == finding.tables


def test_every_variant_has_a_row_for_every_strength_in_order(finding: Finding) -> None:
    (table,) = finding.tables
    assert table.title == "mlp, 1-epoch, digits, lr 0.03"
    assert [(row["method"], row["strength"]) for row in table.rows] == [
        (name, strength) for name in negative.VARIANTS for strength in ("1", "1000", "10000")
    ]
    assert all(list(row) == list(table.columns) for row in table.rows)


def test_the_table_tells_what_the_runs_tell(finding: Finding) -> None:
    for row in finding.tables[0].rows:
        runs = [
            result
            for result in finding.results
            if (result.spec.method, f"{result.spec.strength or 0:g}") == (row["method"], row["strength"])
        ]
        assert row["unstable"] == f"{sum(run.status == 'unstable' for run in runs)} of {len(runs)}"
        assert row["most below 0"] == max(each.negative for run in runs for each in run.stability)
        assert (row["accuracy"] is None) == all(run.status == "unstable" for run in runs)


def test_scores_are_below_0_where_they_can_be(finding: Finding) -> None:
    most = {name: [] for name in negative.VARIANTS}
    for row in finding.tables[0].rows:
        most[row["method"]].append(row["most below 0"])
    assert not any(most["si-absolute"])
    assert any(most["si-signed"])
    assert all(most["si-flipped"])


def test_the_text_says_where_variants_do_not_differ(finding: Finding) -> None:
    rows = finding.tables[0].rows
    assert any(row["most below 0"] == 0 for row in rows if row["method"] != "si-absolute")
    for name in ("si-negative", "si-signed"):
        mine = [row for row in rows if row["method"] == name]
        without = [row for row in mine if row["most below 0"] == 0]
        same = sum(row["accuracies as si-absolute"] for row in without)
        told = [sentence for sentence in finding.text if name in sentence and "no score was below 0" in sentence]
        assert len(told) == bool(without)
        if told:
            assert f"at {len(without)} of {len(mine)} strengths no score" in told[0]
            assert f"at {same} of these every accuracy is that of si-absolute" in told[0]
            assert (f"at the other {len(without) - same} the two differ" in told[0]) == (same < len(without))


def test_runs_are_the_same_where_they_are_on_every_task_that_both_scored() -> None:
    whole = Result(RunSpec("digits", "0", "si", 0), "finished", "", [9.0] * 3, [[8, 1, 2], [7, 8, 3], [6, 7, 8]])
    short = replace(whole, matrix=[row[: number + 2] for number, row in enumerate(whole.matrix)])
    other = replace(short, matrix=[[8, 1], [7, 8, 3], [6, 7, 9]])
    lost, sooner = (replace(short, status="unstable", matrix=short.matrix[:rows]) for rows in (2, 1))

    def same(one: Result, two: Result) -> bool:
        (mine,), (theirs,) = summarize([one]), summarize([two])
        return negative._same(mine, theirs)

    assert same(whole, short)
    assert same(short, whole)
    assert not same(whole, other)
    assert not same(short, lost)
    assert not same(lost, sooner)


def test_the_text_blames_case_2_where_positive_scores_are_unstable(finding: Finding) -> None:
    rows = [row for row in finding.tables[0].rows if row["method"] == "si-absolute"]
    lost = [row["strength"] for row in rows if not row["unstable"].startswith("0")]
    assert lost
    told = next(sentence for sentence in finding.text if "which is Case 2" in sentence)
    assert f"unstable at {len(lost)} of {len(rows)} strengths ({', '.join(lost)})" in told


def test_the_figure_can_be_drawn(finding: Finding, tmp_path: Path) -> None:
    with drawing():
        (made,) = [picture(each, finding.name) for each in finding.draw()]
    assert made.name == "fig-negative-digits"
    assert made.png.startswith(b"\x89PNG")
    assert b"NaN" not in made.svg
    assert "3 strengths" in str(made.inline)


def test_the_paper_trains_at_the_papers_own_rate() -> None:
    rates = {case.data: negative.papers_rate(PAPER, case, "si") for case in negative.first_cases(PAPER)}
    assert rates == {"cifar100": 0.001, "flowers102": 0.003, "caltech256": 0.001}
    assert negative.papers_rate(MINIATURE, negative.first_cases(MINIATURE)[0], "si") == MINIATURE.lrs[0]
