"""Promise 6 on a network: the unrolled form equals the iterates, under the penalty and under the explicit step."""

import pytest
import torch

from mooring import Interpolation, Penalty
from mooring.lab.study.study import Study
from mooring.paper.context.context import Laboratory
from mooring.paper.context.scale import MINIATURE
from mooring.paper.figures import effective_lr
from paper.rendered import rendered


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return Laboratory(Study(tmp_path_factory.mktemp("rates") / "p.sqlite"), MINIATURE.on(None))


@pytest.fixture(scope="module")
def finding(lab):
    return effective_lr.run(lab)


def test_nothing_is_kept_and_each_layer_has_a_row_under_each_pull(lab, finding):
    assert finding.name == "effective-lr"
    assert len(finding.results) == effective_lr.count(lab.scale) == len(lab.study.results()) == 0
    (table,) = finding.tables
    assert [row["layer"] for row in table.rows] == ["backbone.1", "backbone.3"] * 2
    assert len({row["pull"] for row in table.rows}) == 2


def test_the_unrolled_form_equals_the_iterates(finding):
    for row in finding.tables[0].rows:
        assert float(row["largest relative difference"]) < 1e-12


def test_a_second_run_finds_the_same(lab, finding):
    assert effective_lr.run(lab).to_json() == finding.to_json()


def test_the_sentences_say_what_the_table_does(finding):
    rows = finding.tables[0].rows
    for place, pull in enumerate(dict.fromkeys(row["pull"] for row in rows)):
        mine = [row for row in rows if row["pull"] == pull]
        worst = max(float(row["largest relative difference"]) for row in mine)
        assert f"{worst:.1e} ({pull})" in finding.text[0]
        first, last = (row["left in the mean, median"] for row in (mine[0], mine[-1]))
        assert f"at {first:.3g} of the learning rate" in finding.text[1 + place]
        assert f"at {last:.3g} in the last" in finding.text[1 + place]


def test_it_can_be_drawn(finding):
    image = rendered(finding)
    assert image.name == "effective-lr-age"
    assert image.png.startswith(b"\x89PNG")


@pytest.mark.parametrize("root", [1, 2, 3])
def test_the_explicit_step_unrolls_whatever_its_root(lab, root):
    case = MINIATURE.cases()[0]
    found = effective_lr.unroll(case, lab.trained("digits"), Interpolation(root=root), 0.03)
    assert max(found.difference.values()) < 1e-12
    for left in found.left.values():
        assert float(left.min()) >= 0
        assert float(left.max()) <= 1
        assert bool((left.diff(dim=0) <= 0).all())  # older gradients count less


def test_without_strength_every_gradient_counts_whole(lab):
    found = effective_lr.unroll(MINIATURE.cases()[0], lab.trained("digits"), Penalty(0.0), 0.03)
    for left in found.left.values():
        torch.testing.assert_close(left, torch.ones_like(left), rtol=1e-12, atol=0)


def test_at_the_safe_strength_less_is_left_than_below_it(lab):
    found = effective_lr.measure(lab)
    assert found.strength < found.safe
    below = next(iter(found.pulls.values())).mean
    for layer, left in found.at_safe.items():
        assert 0 <= float(left[1]) < float(below[layer][1]) <= 1
