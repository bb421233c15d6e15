"""The root in R: variants are the explicit step with another root, and lists of methods do not contain them."""

import math

import pytest

from mooring import Interpolation
from mooring_lab.methods import METHODS, find_method, resolve_methods
from mooring_lab.model.known_methods import VARIANTS
from mooring_paper.context.scale import EXPLICIT
from mooring_paper.figures import roots


@pytest.fixture(scope="module")
def result(context):
    return roots.run(context)


def mean_forgetting(result, suffix):
    methods = {f"{name}{suffix}" for name in EXPLICIT}
    values = [run.metrics["forgetting"] for run in result.results if run.spec.method in methods]
    return math.fsum(values) / len(values)


def test_every_root_of_every_definition_is_trained_and_has_a_row(context, result):
    assert result.name == "roots"
    assert len(result.results) == len(context.study.results()) == 24
    (table,) = result.tables
    assert [(row["method"], row["root"]) for row in table.rows] == [(m, r) for m in EXPLICIT for r in roots.ROOTS]


def test_second_run_trains_nothing(context, result):
    before = len(context.study.results())
    again = roots.run(context)
    assert len(context.study.results()) == before
    assert again.to_json() == result.to_json()


def test_roots_give_different_runs(result):
    runs = {(run.spec.method, run.spec.seed): run for run in result.results}
    for name in EXPLICIT:
        drifts = [runs[f"{name}{suffix}", 0].drift for suffix in roots.ROOTS.values()]
        assert len({tuple(drift.values()) for drift in drifts}) == len(roots.ROOTS)


def test_figure_is_drawn(result, render):
    image = render(result)
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
