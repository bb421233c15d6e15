"""Case 2 of the paper's instability, in miniature."""

import pytest

from mooring_paper.context.scale import REGULARIZERS
from mooring_paper.figures import violations
from mooring_paper.published.published_numbers import published_violations


@pytest.fixture(scope="module")
def result(context):
    return violations.run(context)


def runs_of(result, method, strength):
    return [r for r in result.results if (r.spec.method, f"{r.spec.strength or 0:g}") == (method, strength)]


def test_number_of_models_is_at_most_the_count_and_none_is_trained_twice(context, result):
    assert result.name == "fig-violations"
    assert len(result.results) == len(context.study.results())
    again = violations.run(context)
    assert len(context.study.results()) == len(result.results)
    assert again.tables == result.tables


def test_strengths_range_from_below_the_first_violation_to_far_above():
    for first in (1e-7, 0.99, 1.0, 123.0, 9.99e9):
        for per_decade in (1, 2, 4):
            strengths = violations.strength_grid(first, per_decade)
            assert len(strengths) == 3 * per_decade + 1
            assert strengths == sorted(set(strengths))
            assert strengths[0] < first < strengths[-1]
    assert violations.strength_grid(123.0, 4) == violations.strength_grid(123.0 + 1e-9, 4)


def test_every_method_has_a_row_for_every_strength(result):
    first, strengths = result.tables
    assert [row["method"] for row in first.rows] == list(REGULARIZERS)
    assert [row["method"] for row in strengths.rows] == [name for name in REGULARIZERS for _ in range(7)]
    assert all(list(row) == list(table.columns) for table in result.tables for row in table.rows)


def test_violations_start_at_the_strength_of_the_table(result):
    starts = {row["method"]: float(row["first violation at"]) for row in result.tables[0].rows}
    for row in result.tables[1].rows:
        runs = runs_of(result, row["method"], row["strength"])
        counts = [run.stability[0].extrapolate + run.stability[0].diverge for run in runs]
        assert float(row["violating"]) == pytest.approx(sum(counts) / len(counts))
        assert (float(row["violating"]) > 0) == (float(row["strength"]) >= starts[row["method"]])
        assert row["unstable"] == f"{sum(run.status == 'unstable' for run in runs)} of {len(runs)}"


def test_instability_starts_at_the_strength_of_the_table(result):
    for row in result.tables[0].rows:
        strengths = [other for other in result.tables[1].rows if other["method"] == row["method"]]
        unstable = [other["strength"] for other in strengths if not other["unstable"].startswith("0")]
        assert row["unstable from"] == (unstable[0] if unstable else None)
        if unstable:
            runs = [run for run in runs_of(result, row["method"], unstable[0]) if run.status == "unstable"]
            fewest = min(run.stability[0].extrapolate + run.stability[0].diverge for run in runs)
            assert row["violating then"] == fewest


def test_methods_without_importance_are_left_out(context, monkeypatch):
    monkeypatch.setattr(violations, "strength_grid", lambda first_violation, per_decade: [])
    result = violations.run(context)
    assert not result.tables
    assert not result.draw()


def test_figure_is_drawn(result, render):
    image = render(result)
    assert image.name == "fig-violations-digits"
    assert image.png.startswith(b"\x89PNG")
    assert all(name in str(image.inline) for name in (*REGULARIZERS, "unclamped"))


def test_published_counts_are_the_papers():
    assert [published_violations("flowers102", method) for method in REGULARIZERS] == [35, 4, 8, 17]
