"""Families, labels that stand apart, and what is said in words."""

import itertools

import numpy as np
import pytest

from mooring.report.families import FAMILIES, family_of
from mooring.report.figures import matrices
from mooring.report.figures.labels import place_labels, spread_labels
from mooring.report.narrative import outcome
from mooring.report.picture import render_drawing
from mooring.report.section import mean_over_seeds, sections
from mooring.report.style import figure_style
from report import synthetic


def test_every_method_has_a_family_with_its_own_colour_and_marker():
    assert {family_of(method).name for method in synthetic.EVERY_METHOD} == {family.name for family in FAMILIES} - {
        "unknown"
    }
    assert family_of("balanced").name == family_of("explicit-").name == family_of("my-own").name == "unknown"
    assert len({family.colour for family in FAMILIES}) == len({family.marker for family in FAMILIES}) == len(FAMILIES)


@pytest.mark.parametrize("crowd", [1, 5, 30])
def test_labels_at_the_ends_of_lines_never_touch(crowd):
    chance = np.random.default_rng(0)
    wanted = (chance.random(crowd) * 0.5).tolist()
    heights = spread_labels(wanted, 0.125, 4.0)
    assert min(heights) >= -1e-9
    assert max(heights) <= 4.0 + 1e-9
    assert all(abs(one - other) >= 0.125 - 1e-9 for one, other in itertools.combinations(heights, 2))
    assert np.argsort(heights).tolist() == np.argsort(wanted).tolist()


def test_labels_of_a_crowd_do_not_cover_each_other():
    chance = np.random.default_rng(1)
    points = np.column_stack([np.linspace(150, 450, 35), np.linspace(300, 150, 35)]) + chance.normal(0, 4, (35, 2))
    widths = chance.uniform(20, 80, 35)
    middles = place_labels(points, widths, 9.0, (640.0, 420.0))
    for one, other in itertools.combinations(range(35), 2):
        across, upward = abs(middles[one] - middles[other])
        assert across >= (widths[one] + widths[other]) / 2 - 1e-9 or upward >= 9.0 - 1e-9


def test_setting_that_lost_seeds_is_not_the_best():
    runs = [synthetic.run("ewc", seed) for seed in (0, 1)]
    runs += [synthetic.run("er", 0), synthetic.run("er", 1, status="unstable", reached=2)]
    section = sections(runs, None)[0]
    assert "The best method was ewc (strength 100)" in outcome(section)[0]
    assert outcome(section)[-1] == "Of 4 runs, 1 was unstable."


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
