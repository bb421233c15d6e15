"""Case 2 of the paper's instability, in miniature."""

from collections.abc import Sequence

import pytest

from mooring.lab.model.results import Result
from mooring.lab.study.study import Study
from mooring.paper.context.context import Laboratory
from mooring.paper.context.result import Finding
from mooring.paper.context.scale import MINIATURE, REGULARIZERS
from mooring.paper.figures import violations
from mooring.paper.published.published_numbers import published_violations
from mooring.report.picture import picture
from mooring.report.style import drawing


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Laboratory:
    return Laboratory(Study(tmp_path_factory.mktemp("violations") / "p.sqlite"), MINIATURE.on(None))


@pytest.fixture(scope="module")
def finding(lab: Laboratory) -> Finding:
    return violations.run(lab)


def runs_of(finding: Finding, method: str, strength: str) -> Sequence[Result]:
    told = [result for result in finding.results if result.spec.method == method]
    return [result for result in told if f"{result.spec.strength or 0:g}" == strength]


def test_it_trains_as_many_models_as_it_says_and_none_twice(lab: Laboratory, finding: Finding) -> None:
    assert finding.name == "fig-violations"
    assert len(finding.results) == len(lab.study.results()) <= violations.count(lab.scale)
    again = violations.run(lab)
    assert len(lab.study.results()) == len(finding.results)
    assert again.text == finding.text
    assert again.tables == finding.tables


def test_strengths_reach_from_below_the_first_violation_to_far_above() -> None:
    for first in (1e-7, 0.99, 1.0, 123.0, 9.99e9):
        for each in (1, 2, 4):
            strengths = violations.lattice(first, each)
            assert len(strengths) == 3 * each + 1
            assert strengths == sorted(set(strengths))
            assert strengths[0] < first < strengths[-1]
    assert violations.lattice(123.0, 4) == violations.lattice(123.0 + 1e-9, 4)


def test_every_method_has_a_row_for_every_strength(finding: Finding) -> None:
    first, every = finding.tables
    assert [row["method"] for row in first.rows] == list(REGULARIZERS)
    assert [row["method"] for row in every.rows] == [name for name in REGULARIZERS for _ in range(7)]
    assert all(list(row) == list(table.columns) for table in finding.tables for row in table.rows)


def test_violations_begin_where_the_table_says(finding: Finding) -> None:
    starts = {row["method"]: float(row["first violation at"]) for row in finding.tables[0].rows}
    for row in finding.tables[1].rows:
        runs = runs_of(finding, row["method"], row["strength"])
        told = [run.stability[0].extrapolate + run.stability[0].diverge for run in runs]
        assert float(row["violating"]) == pytest.approx(sum(told) / len(told))
        assert (float(row["violating"]) > 0) == (float(row["strength"]) >= starts[row["method"]])
        assert row["unstable"] == f"{sum(run.status == 'unstable' for run in runs)} of {len(runs)}"


def test_training_first_breaks_where_the_table_says(finding: Finding) -> None:
    for row in finding.tables[0].rows:
        every = [each for each in finding.tables[1].rows if each["method"] == row["method"]]
        broken = [each["strength"] for each in every if not each["unstable"].startswith("0")]
        assert row["unstable from"] == (broken[0] if broken else None)
        if broken:
            runs = [run for run in runs_of(finding, row["method"], broken[0]) if run.status == "unstable"]
            fewest = min(run.stability[0].extrapolate + run.stability[0].diverge for run in runs)
            assert row["violating then"] == fewest
            said = next(told for told in finding.text if f"{row['method']}: " in told)
            assert f"with {fewest} violating parameter" in said
            assert ("the weakest tried" in said) == (broken[0] == every[0]["strength"])


def test_the_text_says_whether_instability_comes_before_a_violation(finding: Finding) -> None:
    broken = [run for run in finding.results if run.status == "unstable" and run.spec.method in REGULARIZERS]
    before = sum(not run.stability[0].warning for run in broken)
    told = next(
        told for told in finding.text if told.startswith(f"{len(broken)} runs without clamping became unstable")
    )
    assert ("none before, as the paper says" in told) == (before == 0)


def test_the_text_says_whether_clamping_cures_it(finding: Finding) -> None:
    rows = finding.tables[1].rows
    lost = [row for row in rows if not row["unstable"].startswith("0")]
    cured = sum(row["clamped, unstable"].startswith("0") for row in lost)
    assert any(f"of {len(lost)} settings that are unstable without, clamping cures {cured}." in t for t in finding.text)


def test_the_text_counts_runs_that_fell_without_becoming_unstable(finding: Finding) -> None:
    fallen = silent = 0
    for row in finding.tables[1].rows:
        pairs = zip(
            runs_of(finding, row["method"], row["strength"]),
            runs_of(finding, f"clamped-{row['method']}", row["strength"]),
            strict=True,
        )
        fell = any(one.metrics["accuracy"] < two.metrics["accuracy"] - 10 for one, two in pairs)
        fallen, silent = fallen + fell, silent + (fell and row["unstable"].startswith("0"))
    assert fallen
    assert any(f"At {fallen} settings" in told and f"at {silent} of them no run" in told for told in finding.text)


def test_a_method_without_importance_is_named_and_left_out(lab: Laboratory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(violations, "lattice", lambda first, each: [])
    found = violations.run(lab)
    assert "No range of strengths" in found.text[0]
    assert not found.tables
    assert not found.draw()


def test_the_figure_can_be_drawn(finding: Finding) -> None:
    with drawing():
        (made,) = [picture(each, finding.name) for each in finding.draw()]
    assert made.name == "fig-violations-digits"
    assert made.png.startswith(b"\x89PNG")
    assert all(name in str(made.inline) for name in (*REGULARIZERS, "unclamped"))


def test_the_papers_counts_are_the_papers() -> None:
    told = [published_violations("flowers102", method) for method in REGULARIZERS]
    assert told == [35, 4, 8, 17]
