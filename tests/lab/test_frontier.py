"""The frontier: hulls and areas as drawn by hand, dials swept, and settings that break left out."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooring.lab.methods import find_method, resolve_methods
from mooring.lab.model.results import Result
from mooring.lab.model.spec import RunSpec
from mooring.lab.model.summary import summarize
from mooring.lab.study.defaults import SWEPT_METHODS
from mooring.lab.study.frontier import Frontier, area, dials, frontiers, hull

percent = st.integers(0, 100).map(float)
points = st.lists(st.tuples(percent, percent), min_size=1, max_size=12)


@given(points)
def test_nothing_lies_above_the_hull_and_its_corners_are_points(some):
    edge = hull(some)
    assert set(edge) <= set(some)
    assert [x for x, _ in edge] == sorted(x for x, _ in edge)
    for kept, learned in some:
        if kept <= edge[0][0]:
            assert learned <= edge[0][1]
        for (left, high), (right, low) in pairwise(edge):
            if left <= kept <= right:
                assert learned <= high + (low - high) * (kept - left) / (right - left) + 1e-9


@given(points, st.tuples(percent, percent))
def test_another_setting_never_makes_the_area_smaller(some, more):
    assert area([*some, more]) >= area(some) - 1e-9
    assert 0 <= area(some) <= 100


def test_the_area_of_a_triangle_on_a_rectangle():
    assert area([(50.0, 100.0), (100.0, 50.0)]) == pytest.approx(50 + 37.5)


def result(method: str, seed: int, strength: float | None, learned: float, lost: float, status: str = "finished"):
    spec = RunSpec("digits", "0", method, seed, strength=strength)
    matrix = [[learned, 0.0], [learned - 2 * lost, learned]]
    return Result(spec, status, "", [10.0, 10.0], matrix if status == "finished" else [])


def made() -> Frontier:
    runs = []
    for seed in (0, 1):
        runs += [result("plain", seed, None, 98 + seed, 30), result("joint", seed, None, 99, 0)]
        for strength, learned, lost in ((0.1, 97, 20), (1.0, 95, 5), (10.0, 93, 4), (1e4, 99, 0)):
            status = "unstable" if strength == 1e4 and seed else "finished"
            runs.append(result("ewc", seed, strength, learned, lost, status))
        runs += [result("explicit-ewc", seed, None, 90, 1), result("er", seed, None, 99, 0)]
    (found,) = frontiers(summarize(runs))
    return found


def test_the_best_of_a_dial_finished_with_every_seed_and_its_good_range_has_no_gap():
    ewc = next(each for each in made().swept if each.method == "ewc")
    assert ewc.best.setting.strength == 1.0
    assert ewc.good == (1.0, 10.0)
    assert ewc.decades == pytest.approx(1.0)
    plain = next(each for each in made().swept if each.method == "plain")
    assert (plain.good, plain.decades) == (None, None)


def test_who_keeps_data_is_on_no_frontier_and_is_no_rival():
    found = made()
    assert {row.setting.method for _, row in found.hull} == {"plain", "ewc", "explicit-ewc"}
    assert found.rival("ewc").method == "explicit-ewc"
    assert found.ahead("ewc").mean == pytest.approx(1.0)
    assert found.swept[0].method in ("joint", "er")


def test_areas_are_taken_seed_by_seed():
    plain = next(each for each in made().swept if each.method == "plain")
    assert plain.area.mean == pytest.approx(0.7 * 98.5)
    assert plain.area.count == 2


def test_a_method_of_which_nothing_finished_stands_last_without_numbers():
    runs = [result("ewc", 0, 1.0, 0, 0, "unstable"), result("plain", 0, None, 90, 1)]
    (found,) = frontiers(summarize(runs))
    assert [each.method for each in found.swept] == ["plain", "ewc"]
    assert (found.swept[1].best, found.swept[1].area) == (None, None)
    assert found.to_json()["methods"][1]["best"] is None


def test_every_method_that_is_swept_by_default_has_a_dial_where_it_has_a_strength():
    names = resolve_methods(SWEPT_METHODS)
    assert set(dials(names)) == {name for name in names if find_method(name).has_strength}
    assert all(len(values) >= 6 for values in dials(names).values())
