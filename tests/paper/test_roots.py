"""The root in R: the variants are the explicit step with another root, and no list of methods names them."""

import math

import pytest

from mooring import Interpolation
from mooring.lab.methods import METHODS, find_method, resolve_methods
from mooring.lab.methods.registry import VARIANTS
from mooring.lab.model.metrics import confidence_interval
from mooring.lab.study.study import Study
from mooring.paper.context.context import Laboratory
from mooring.paper.context.scale import EXPLICIT, MINIATURE
from mooring.paper.figures import roots
from paper.rendered import rendered


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return Laboratory(Study(tmp_path_factory.mktemp("roots") / "p.sqlite"), MINIATURE.on(None))


@pytest.fixture(scope="module")
def finding(lab):
    return roots.run(lab)


def test_every_root_of_every_definition_is_trained_and_has_a_row(lab, finding):
    assert finding.name == "roots"
    assert len(finding.results) == roots.count(lab.scale) == len(lab.study.results()) == 24
    (table,) = finding.tables
    assert [(row["method"], row["root"]) for row in table.rows] == [(m, r) for m in EXPLICIT for r in roots.ROOTS]


def test_a_second_run_trains_nothing(lab, finding):
    before = len(lab.study.results())
    again = roots.run(lab)
    assert len(lab.study.results()) == before
    assert again.to_json() == finding.to_json()


def test_a_root_makes_a_difference(finding):
    found = {(r.spec.method, r.spec.seed): r for r in finding.results}
    for name in EXPLICIT:
        drifts = [found[f"{name}{ending}", 0].drift for ending in roots.ROOTS.values()]
        assert len({tuple(drift.values()) for drift in drifts}) == len(roots.ROOTS)


def test_the_sentences_say_what_the_table_does(finding):
    rows = finding.tables[0].rows
    for sentence, root in zip(finding.text, ("square root", "cube root"), strict=False):
        told = [row["forgets less than the plain ratio by"] for row in rows if row["root"] == root]
        assert f"the {root} forgets less" in sentence
        assert f"for {sum(float(each.split()[0]) > 0 for each in told)} of {len(EXPLICIT)} definitions" in sentence
    by_hand = {root: _mean_forgetting(finding, ending) for root, ending in roots.ROOTS.items()}
    gain = by_hand["plain ratio"] - by_hand["square root"]
    assert f"{abs(gain):.2f} points {'higher' if gain < 0 else 'lower'}" in finding.text[0]


def test_what_differs_by_rounding_forgets_no_less():
    same = confidence_interval([1e-15, 1e-15])
    told = roots._said("digits", "cube root", {("explicit-ewc", "cube root"): same})
    assert "for 0 of 1 definitions" in told
    assert "forgetting is the same" in told


def _mean_forgetting(finding, ending):
    methods = {f"{name}{ending}" for name in EXPLICIT}
    values = [r.metrics["forgetting"] for r in finding.results if r.spec.method in methods]
    return math.fsum(values) / len(values)


def test_it_can_be_drawn(finding):
    image = rendered(finding)
    assert image.name == "roots-forgetting"
    assert image.png.startswith(b"\x89PNG")


def test_variants_are_the_explicit_step_with_another_root():
    for name in EXPLICIT:
        assert find_method(f"{name}-cube").pull(0.0) == Interpolation(root=3)
        assert find_method(f"{name}-ratio").pull(0.0) == Interpolation(root=1)
        assert find_method(f"{name}-ratio").importance(0) == find_method(name).importance(0)
        assert not find_method(f"{name}-cube").has_strength


def test_variants_are_known_by_name_and_in_no_list():
    assert not set(VARIANTS) & set(METHODS)
    assert not set(VARIANTS) & set(resolve_methods("all"))
    assert resolve_methods("explicit-ewc-cube") == ["explicit-ewc-cube"]
