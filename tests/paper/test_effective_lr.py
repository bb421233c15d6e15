"""The unrolled form equals the iterates on a network, under the penalty and under the explicit step."""

import pytest
import torch

from mooring import Interpolation, Penalty
from mooring_paper.context.scale import MINIATURE
from mooring_paper.figures import effective_lr


@pytest.fixture(scope="module")
def result(context):
    return effective_lr.run(context)


def test_no_run_is_stored_and_every_layer_has_a_row_under_each_pull(context, result):
    assert result.name == "effective-lr"
    assert len(result.results) == len(context.study.results()) == 0
    table, at_safe_strength = result.tables
    assert [row["layer"] for row in table.rows] == ["backbone.1", "backbone.3"] * 2
    assert len({row["pull"] for row in table.rows}) == 2
    assert [row["layer"] for row in at_safe_strength.rows] == ["backbone.1", "backbone.3"]


def test_unrolled_form_equals_the_iterates(result):
    for row in result.tables[0].rows:
        assert float(row["largest relative difference"]) < 1e-12


def test_second_run_gives_the_same_result(context, result):
    assert effective_lr.run(context).to_json() == result.to_json()


def test_sentences_match_the_table(result):
    rows = result.tables[0].rows
    for index, pull in enumerate(dict.fromkeys(row["pull"] for row in rows)):
        layers = [row for row in rows if row["pull"] == pull]
        largest = max(float(row["largest relative difference"]) for row in layers)
        assert f"{largest:.1e} ({pull})" in result.text[0]
        first, last = (row["left in the mean, median"] for row in (layers[0], layers[-1]))
        assert f"is on average {first:.3g} times the learning rate" in result.text[1 + index]
        assert f"in the first layer, and {last:.3g} times in the last" in result.text[1 + index]


def test_figure_is_drawn(result, render):
    image = render(result)
    assert image.name == "effective-lr-age"
    assert image.png.startswith(b"\x89PNG")


@pytest.mark.parametrize("root", [1, 2, 3])
def test_explicit_step_unrolls_with_every_root(context, root):
    condition = MINIATURE.conditions()[0]
    task = effective_lr.unroll(Interpolation(root=root), condition, context.main_stream("digits"), 0.03)
    assert max(task.difference.values()) < 1e-12
    for fractions in task.fraction_by_age.values():
        assert float(fractions.min()) >= 0
        assert float(fractions.max()) <= 1
        assert bool((fractions.diff(dim=0) <= 0).all())  # older gradients count less


def test_without_strength_every_gradient_keeps_its_learning_rate(context):
    task = effective_lr.unroll(Penalty(0.0), MINIATURE.conditions()[0], context.main_stream("digits"), 0.03)
    for fractions in task.fraction_by_age.values():
        torch.testing.assert_close(fractions, torch.ones_like(fractions), rtol=1e-12, atol=0)


def test_less_of_the_learning_rate_remains_at_the_safe_strength_than_below_it(context):
    rates = effective_lr.measure(context)
    assert rates.strength < rates.safe_strength
    below = next(iter(rates.tasks.values())).mean_fraction
    for layer, fractions in rates.fraction_at_safe_strength.items():
        assert 0 <= float(fractions[1]) < float(below[layer][1]) <= 1
