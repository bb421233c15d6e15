"""Families, labels that stand apart, and what is said in words."""

from dataclasses import replace

import numpy as np
import pytest

from laboratory.report import synthetic
from mooring_lab.methods import METHODS
from mooring_lab.report import layer_figures, matrices
from mooring_lab.report.families import FAMILIES, family_of, point_styles
from mooring_lab.report.narrative import outcome
from mooring_lab.report.picture import render_drawing
from mooring_lab.report.section import mean_over_seeds, sections
from mooring_lab.report.style import figure_style


def test_every_method_has_a_family_with_its_own_colour_and_marker():
    assert {family_of(method).name for method in synthetic.EVERY_METHOD} == {family.name for family in FAMILIES} - {
        "own"
    }
    assert {name for name in METHODS if family_of(name).name == "own"} == set()
    assert family_of("balanced").name == family_of("explicit-").name == family_of("my-own").name == "own"
    assert family_of("explicit-mine:EWC").name == "own"
    styles = [tuple(sorted(style.items())) for style in point_styles(synthetic.EVERY_METHOD)]
    assert len(set(styles)) == len(styles)
    assert len({family.colour for family in FAMILIES}) == len({family.marker for family in FAMILIES}) == len(FAMILIES)


def test_setting_that_lost_seeds_is_not_ranked():
    runs = [synthetic.run("ewc", seed) for seed in (0, 1)]
    runs += [synthetic.run("er", 0), synthetic.run("er", 1, status="unstable", reached=2)]
    section = sections(runs, None)[0]
    assert "The only method that finished in every seed was ewc (strength 100)" in outcome(section)[0]
    assert outcome(section)[-1] == "Of 4 runs, 1 was unstable."


def final(method, accuracies):
    """Return a run for each seed that ends with this accuracy on every task."""
    runs = [synthetic.run(method, seed, tasks=2) for seed in range(len(accuracies))]
    return [replace(run, matrix=[run.matrix[0], [a, a]]) for run, a in zip(runs, accuracies, strict=True)]


@pytest.mark.parametrize(
    ("plain", "er", "verdict"),
    [
        # Seed by seed 5, 6 and 4 points apart, though the intervals of both methods overlap.
        ([50.0, 70.0, 90.0], [55.0, 76.0, 94.0], "The best method was er"),
        # 1, 2 and 9 points apart: the interval of the difference contains 0.
        ([50.0, 70.0, 90.0], [51.0, 72.0, 99.0], "It is not surely the best: seed by seed, its difference"),
        ([50.0, 70.0], [55.0, 75.0], "It is not called the best: that takes 3 seeds or more, not 2."),
        ([50.0], [99.0], "It is not called the best: that takes 3 seeds or more, not 1."),
    ],
)
def test_best_method_needs_three_seeds_and_paired_differences_that_exclude_zero(plain, er, verdict):
    text = outcome(sections([*final("plain", plain), *final("er", er)], None)[0])[0]
    assert verdict in text
    assert text.startswith("The best method" if "was er" in verdict else "The method with the highest mean was er: ")
    assert ("best method was" in text) == ("was er" in verdict)


def test_rivals_that_may_be_equal_are_counted_and_named():
    runs = final("er", [90.0, 91.0, 92.0]) + final("mas", [89.0, 93.0, 90.0]) + final("plain", [10.0, 11.0, 12.0])
    assert "its difference from 1 of the 2 other methods (mas) may be 0." in outcome(sections(runs, None)[0])[0]


def test_joint_training_that_was_passed_is_no_bound():
    runs = final("plain", [50.0]) + final("joint", [80.0]) + final("er", [85.0])
    text = " ".join(outcome(sections(runs, None)[0]))
    assert "er ended 5.00 points above it" in text
    assert "bound" not in text


def test_outcome_has_no_sentence_without_runs_for_it():
    assert outcome(sections([synthetic.run("joint", 0)], None)[0]) == ["The run finished."]
    lost = sections([synthetic.run("ewc", 0, status="unstable", reached=1)], None)[0]
    assert outcome(lost) == ["No method finished in every seed.", "Of 1 run, 1 was unstable."]


@pytest.mark.parametrize("whole", [False, True])
def test_the_heat_map_draws_what_was_scored_and_leaves_the_rest_blank(whole):
    section = sections([synthetic.run("plain", seed, tasks=4, whole=whole) for seed in (0, 1)], None)[0]
    with figure_style():
        drawing = matrices.draw(section)
        render_drawing(drawing, section.slug)
    (panel,) = (axes for axes in drawing.figure.axes if len(axes.texts) > 4)
    blank = np.triu(np.ones((4, 4), dtype=bool), 2) & (not whole)
    assert np.array_equal(np.ma.getmaskarray(panel.images[0].get_array()), blank)
    labelled = {(int(text.get_position()[1]), int(text.get_position()[0])) for text in panel.texts}
    assert {tuple(cell) for cell in np.argwhere(~blank)} <= labelled


def test_every_figure_has_the_colour_of_a_family_for_its_methods():
    section = sections(synthetic.study(), "plain")[0]
    families = {family.colour: family.name for family in FAMILIES}
    with figure_style():
        drawings = [layer_figures.draw(section, measure) for measure in ("drift", "importance")]
    for drawing in drawings:
        for panel in drawing.figure.axes:
            assert {families[line.get_color()] for line in panel.lines} == {panel.get_title(loc="left")}


def test_a_study_that_was_continued_has_rows_of_both_kinds():
    runs = [synthetic.run("ewc", 0, tasks=4, whole=True), synthetic.run("ewc", 1, tasks=4)]
    (entry,) = sections(runs, None)[0].entries
    stack = entry.matrices(4)
    assert np.isfinite(stack[0]).all()
    assert np.array_equal(np.isfinite(stack[1]), np.tril(np.ones((4, 4), dtype=bool), 1))
    assert np.isfinite(mean_over_seeds(stack)[0]).all()


def test_outcome_says_that_the_best_of_several_settings_was_chosen():
    runs = [synthetic.run("ewc", seed, strength=strength) for seed in (0, 1) for strength in (1.0, 100.0)]
    section = sections(runs, None)[0]
    assert len(section.shown) == 1
    assert "Its setting is the best of 2, chosen by the accuracy shown here." in outcome(section)[0]
