"""The frontier: envelopes and areas as drawn by hand, dials swept, and unstable settings left out."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg

from mooring.errors import MooringError
from mooring_lab.methods import find_method, resolve_methods
from mooring_lab.model.results import Result
from mooring_lab.model.spec import RunSpec
from mooring_lab.model.summary import Row, summarize
from mooring_lab.report.frontier_figure import draw
from mooring_lab.report.style import figure_style
from mooring_lab.streams.options import StreamOptions, open_stream
from mooring_lab.streams.slices import hold_out
from mooring_lab.study.comparison import comparison
from mooring_lab.study.defaults import SWEPT_METHODS
from mooring_lab.study.frontier import (
    Frontier,
    Sweep,
    area_under,
    build_frontiers,
    dials,
    sweep_frontiers,
    upper_envelope,
)
from mooring_lab.study.study import Study

PERCENT = st.integers(0, 100).map(float)
POINTS = st.lists(st.tuples(PERCENT, PERCENT), min_size=1, max_size=12)


@given(POINTS)
def test_no_point_lies_above_the_envelope_and_its_corners_are_points(points):
    edge = upper_envelope(points)
    assert set(edge) <= set(points)
    assert [x for x, _ in edge] == sorted(x for x, _ in edge)
    for kept, learned in points:
        if kept <= edge[0][0]:
            assert learned <= edge[0][1]
        for (left, high), (right, low) in pairwise(edge):
            if left <= kept <= right:
                assert learned <= high + (low - high) * (kept - left) / (right - left) + 1e-9


@given(POINTS, st.tuples(PERCENT, PERCENT))
def test_another_point_never_reduces_the_area(points, point):
    assert area_under([*points, point]) >= area_under(points) - 1e-9
    assert 0 <= area_under(points) <= 100


def test_area_of_a_triangle_on_a_rectangle():
    assert area_under([(50.0, 100.0), (100.0, 50.0)]) == pytest.approx(50 + 37.5)


def rows_of(*runs: Result) -> list[Row]:
    """Return a search that finds the same as the runs."""
    return [row for row in summarize(runs) if row.setting.strength is not None]


def result(method: str, seed: int, strength: float | None, learned: float, lost: float, status: str = "finished"):
    spec = RunSpec("digits", "0", method, seed, strength=strength)
    matrix = [[learned, 0.0], [learned - 2 * lost, learned]]
    return Result(spec, status, "", [10.0, 10.0], matrix if status == "finished" else [])


def example_frontier() -> Frontier:
    runs = []
    for seed in (0, 1):
        runs += [result("plain", seed, None, 98 + seed, 30), result("joint", seed, None, 99, 0)]
        for strength, learned, lost in ((0.1, 97, 20), (1.0, 95, 5), (10.0, 93, 4), (1e4, 99, 0)):
            status = "unstable" if strength == 1e4 and seed else "finished"
            runs.append(result("ewc", seed, strength, learned, lost, status))
        runs += [result("explicit-ewc", seed, None, 90, 1), result("er", seed, None, 99, 0)]
    (frontier,) = build_frontiers(summarize(runs), rows_of(*runs))
    return frontier


def sweep_of(method: str) -> Sweep:
    return next(sweep for sweep in example_frontier().sweeps if sweep.method == method)


def test_best_setting_finished_with_every_seed_and_its_good_range_has_no_gap():
    ewc = sweep_of("ewc")
    assert ewc.best.setting.strength == 1.0
    assert ewc.good_range == (1.0, 10.0)
    assert ewc.decades == pytest.approx(1.0)
    plain = sweep_of("plain")
    assert (plain.good_range, plain.decades) == (None, None)


def test_strength_is_chosen_by_the_search_and_not_by_the_scores():
    accuracies = {0.1: (96, 80), 1.0: (80, 90), 10.0: (70, 99)}
    runs = [result("ewc", 0, strength, scored, 0) for strength, (scored, _) in accuracies.items()]
    searched = [result("ewc", 9, strength, held_out, 0) for strength, (_, held_out) in accuracies.items()]
    searched[2] = result("ewc", 9, 10.0, 0, 0, "unstable")
    (frontier,) = build_frontiers(summarize(runs), summarize(searched))
    (sweep,) = frontier.sweeps
    assert sweep.best.setting.strength == 1.0
    assert sweep.best.metrics["accuracy"].mean == 80
    assert (frontier.scored_seeds, frontier.search_seeds) == ((0,), (9,))
    with pytest.raises(MooringError, match="ewc has 3 strengths: give the rows of a search"):
        build_frontiers(summarize(runs))


def test_search_sees_no_seed_and_no_test_image_of_the_scores(tmp_path):
    options, study = StreamOptions("digits-permuted", tasks=2, limit=40), Study(tmp_path / "study.sqlite")
    asked = comparison(options, "plain,wise-ft", [0, 1], strength={"wise-ft": [0.2, 0.8]}, epochs=1)
    (frontier,) = sweep_frontiers(study, asked, [4])
    stream = open_stream(options)
    held = hold_out(stream)
    specs = [result.spec for result in study.results()]
    assert {(spec.method, spec.strength, spec.seed, spec.data) for spec in specs} == {
        *(("plain", None, seed, stream.fingerprint) for seed in (0, 1)),
        *(("wise-ft", strength, seed, stream.fingerprint) for strength in (0.2, 0.8) for seed in (0, 1)),
        *(("wise-ft", strength, 4, held.fingerprint) for strength in (0.2, 0.8)),
    }
    assert (frontier.stream, frontier.search_seeds) == (f"{stream.name}, domain-incremental", (4,))
    with pytest.raises(MooringError, match="seed 1 would choose a strength and score it too: give other seeds to"):
        sweep_frontiers(study, asked, [1, 2])


def test_methods_that_keep_data_are_on_no_frontier_and_are_no_rivals():
    frontier = example_frontier()
    assert {row.setting.method for _, row in frontier.envelope} == {"plain", "ewc", "explicit-ewc"}
    assert frontier.rival("ewc").method == "explicit-ewc"
    assert frontier.lead("ewc").mean == pytest.approx(1.0)
    assert frontier.sweeps[0].method in ("joint", "er")


def test_lead_has_an_interval_within_100_points():
    accuracies = {"plain": (20, 50), "ewc": (60, 70)}  # 40 and 20 points apart
    runs = [result(method, seed, None, a, 0) for method, both in accuracies.items() for seed, a in enumerate(both)]
    (frontier,) = build_frontiers(summarize(runs))
    lead = frontier.lead("ewc")
    assert (lead.mean, lead.low, lead.high) == (30.0, pytest.approx(30 - 127.06204736432095), 100.0)


def test_area_is_computed_seed_by_seed():
    plain = sweep_of("plain")
    assert plain.area.mean == pytest.approx(0.7 * 98.5)
    assert plain.area.count == 2


def test_method_without_finished_rows_is_last_and_has_no_numbers():
    runs = [result("ewc", 0, 1.0, 0, 0, "unstable"), result("plain", 0, None, 90, 1)]
    (frontier,) = build_frontiers(summarize(runs), rows_of(*runs))
    assert [sweep.method for sweep in frontier.sweeps] == ["plain", "ewc"]
    assert (frontier.sweeps[1].best, frontier.sweeps[1].area) == (None, None)
    assert frontier.to_json()["methods"][1]["best"] is None


def test_good_range_that_begins_at_0_has_no_width_in_decades():
    runs = [result("wise-ft", 0, strength, 90, 1) for strength in (0.0, 0.5)]
    (frontier,) = build_frontiers(summarize(runs), rows_of(*runs))
    assert frontier.sweeps[0].good_range == (0.0, 0.5)
    assert frontier.to_json()["methods"][0]["decades"] is None


def test_methods_that_reach_the_same_point_are_all_on_the_frontier():
    runs = [result(method, 0, None, 95, 5) for method in ("explicit-ewc", "plain", "explicit-mas")]
    (frontier,) = build_frontiers(summarize([*runs, result("explicit-si", 0, None, 90, 6)]))
    assert [row.label for _, row in frontier.envelope] == ["explicit-ewc", "plain", "explicit-mas"]


def test_every_swept_method_with_a_strength_has_a_dial():
    names = resolve_methods(SWEPT_METHODS)
    assert set(dials(names)) == {name for name in names if find_method(name).has_strength}
    assert all(len(values) >= 6 for values in dials(names).values())


def test_numbers_have_the_accuracy_of_every_seed_for_paired_differences():
    runs = [result("plain", seed, None, 90 + seed, 5) for seed in (3, 4)]
    (frontier,) = build_frontiers(summarize(runs))
    (method,) = json.loads(json.dumps(frontier.to_json()))["methods"]
    assert method["accuracies"] == {"3": 88.0, "4": 89.0}


def test_legend_of_many_methods_is_within_the_figure():
    names = resolve_methods(SWEPT_METHODS)
    runs = [result(name, 0, find_method(name).strength, 90, 5) for name in names]
    (frontier,) = build_frontiers(summarize(runs), rows_of(*runs))
    with figure_style():
        figure = draw(frontier).figure
        legend = figure.legends[0].get_window_extent(FigureCanvasAgg(figure).get_renderer())
    texts = {text.get_text().partition(" ")[0] for text in figure.legends[0].get_texts()}
    assert texts == {*names, "frontier"} - {"joint"}
    assert figure.bbox.x0 <= legend.x0 < legend.x1 <= figure.bbox.x1
    assert all(axes.get_position().y0 == figure.axes[0].get_position().y0 for axes in figure.axes)  # beside each other


def test_joint_training_has_no_area_and_is_not_drawn_but_has_its_accuracy():
    results = [
        Result(RunSpec("digits", "0", method, 0), "finished", "", [10.0] * 2, [[90.0, 20.0], [70.0, 80.0]])
        for method in ("plain", "joint")
    ]
    (frontier,) = build_frontiers(summarize(results))
    by_method = {sweep.method: sweep for sweep in frontier.sweeps}
    assert by_method["joint"].area is None
    assert by_method["joint"].best.metrics["accuracy"].mean == 75
    assert by_method["plain"].area.mean == pytest.approx(90 * 85 / 100)
    assert json.loads(json.dumps(frontier.to_json()))["scenario"] == "task"
    names = [text.get_text() for text in draw(frontier).figure.legends[0].get_texts()]
    assert names == ["plain", "frontier without stored samples"]
