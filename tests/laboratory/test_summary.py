"""Tests of summary tables: rows, intervals and paired differences, against values computed by hand."""

import json
import math
from dataclasses import replace

import pytest

from mooring.errors import MooringError
from mooring_lab.model.results import METRICS, Result
from mooring_lab.model.spec import RunSpec
from mooring_lab.model.summary import summarize

T3 = 4.302652729911275  # Student's t for 95 % and two degrees of freedom
T2 = 12.706204736432095  # and for one degree of freedom


def run(method: str, seed: int, rows=None, status="finished", **fields) -> Result:
    """Return the result of a run over two tasks with the given accuracies."""
    spec = RunSpec(method=method, seed=seed, **{"stream": "digits", "data": "0", "lr": 0.02, **fields})
    return Result(spec, status, "" if status == "finished" else "why", [10.0, 30.0], rows or [])


def matrix(first: float, final: float, last: float) -> list[list[float]]:
    """Return accuracies on the first task after its training and at the end, and on the last task."""
    return [[first, 20.0], [final, last]]


PLAIN = [run("plain", 0, matrix(90, 50, 80)), run("plain", 1, matrix(92, 40, 90)), run("plain", 2, matrix(94, 60, 70))]
EWC = [
    run("ewc", 0, matrix(90, 80, 70), strength=10.0),
    run("ewc", 1, matrix(92, 86, 80), strength=10.0),
    run("ewc", 2, matrix(94, 90, 60), strength=10.0),
]


def test_row_has_mean_std_and_interval_of_every_metric():
    row = summarize(PLAIN)[0]
    assert list(row.metrics) == list(METRICS)
    accuracy = row.metrics["accuracy"]  # 65, 65, 65
    assert (accuracy.mean, accuracy.std, accuracy.low, accuracy.high, accuracy.count) == (65.0, 0.0, 65.0, 65.0, 3)
    forgetting = row.metrics["forgetting"]  # (90 - 50) / 2, (92 - 40) / 2, (94 - 60) / 2
    assert forgetting.mean == pytest.approx((20 + 26 + 17) / 3)
    std = math.sqrt(((20 - 21) ** 2 + (26 - 21) ** 2 + (17 - 21) ** 2) / 2)
    assert forgetting.std == pytest.approx(std)
    assert forgetting.low == pytest.approx(21 - T3 * std / math.sqrt(3))
    assert forgetting.high == pytest.approx(21 + T3 * std / math.sqrt(3))
    assert row.metrics["learned"].mean == pytest.approx((85 + 91 + 82) / 3)
    assert row.metrics["backward"].mean == pytest.approx(-42)
    assert row.metrics["forward"].mean == pytest.approx(20 - 30)
    assert row.difference is None


def test_intervals_stay_within_the_values_that_a_metric_can_have():
    high = [run("er", 0, matrix(100, 96, 100)), run("er", 1, matrix(100, 100, 100))]
    low = [run("er", 0, matrix(4, 4, 0)), run("er", 1, matrix(0, 0, 0))]
    for results, mean in ((high, 99.0), (low, 1.0)):
        metrics = summarize(results)[0].metrics
        half = T2 * math.sqrt(2) / math.sqrt(2)  # accuracies 98 and 100, or 2 and 0: their deviation is sqrt(2)
        assert metrics["accuracy"].mean == mean
        assert metrics["accuracy"].std == pytest.approx(math.sqrt(2))
        assert metrics["accuracy"].low == pytest.approx(max(mean - half, 0.0))
        assert metrics["accuracy"].high == pytest.approx(min(mean + half, 100.0))
    metrics = summarize(high)[0].metrics
    assert metrics["forgetting"].low == 0  # 2 and 0 points
    assert metrics["backward"].low == pytest.approx(-2 - T2 * math.sqrt(8) / math.sqrt(2))  # -4 and 0, and below 0


def test_intervals_of_differences_stay_within_100_points():
    plain = [run("plain", 0, matrix(50, 50, 50)), run("plain", 1, matrix(50, 50, 50))]
    ewc = [run("ewc", 0, matrix(60, 60, 60)), run("ewc", 1, matrix(30, 30, 30))]
    joint = [run("joint", 0, matrix(0, 90, 90)), run("joint", 1, matrix(0, 70, 70))]
    row = summarize([*plain, *ewc, *joint], baseline="plain")[1]
    for interval, mean in ((row.difference, -5), (row.metrics["intransigence"], 35)):  # 10, -20 and 30, 40
        half = T2 * interval.std / math.sqrt(2)
        assert interval.mean == pytest.approx(mean)
        assert interval.low == pytest.approx(max(mean - half, -100.0))
        assert interval.high == pytest.approx(min(mean + half, 100.0))
    assert (row.difference.low, row.difference.high) == (-100.0, 100.0)  # -5 -+ 190.6


def test_rows_keep_the_order_of_first_runs_and_sort_seeds():
    mixed = [EWC[2], PLAIN[1], EWC[0], PLAIN[0], EWC[1], PLAIN[2]]
    rows = summarize(mixed)
    assert [row.label for row in rows] == ["ewc 10", "plain"]
    assert [[result.spec.seed for result in row.results] for row in rows] == [[0, 1, 2]] * 2


def test_any_difference_but_the_seed_makes_another_row():
    others = [
        {"lr": 0.5},
        {"strength": 1.0},
        {"strength": 100000.0},
        {"network": "cnn6"},
        {"epochs": 9},
        {"batch": 9},
        {"data": "1"},
        {"heads": "fresh"},
        {"dtype": "float64"},
    ]
    base = {"strength": 10.0}
    results = [run("ewc", seed, matrix(1, 1, 1), **{**base, **other}) for other in ({}, *others) for seed in (0, 1)]
    rows = summarize(results)
    assert len(rows) == len(others) + 1
    assert all(len(row.results) == 2 for row in rows)
    assert [rows[i].label for i in (0, 2, 3)] == ["ewc 10", "ewc 1", "ewc 100000"] or rows[3].label == "ewc 1e+05"


def test_paired_difference_compares_equal_seeds():
    rows = summarize([*PLAIN, *EWC], baseline="plain")
    assert rows[0].difference.mean == 0.0
    difference = rows[1].difference  # 75 - 65, 83 - 65, 75 - 65
    std = math.sqrt(((10 - 38 / 3) ** 2 * 2 + (18 - 38 / 3) ** 2) / 2)
    assert difference.mean == pytest.approx(38 / 3)
    assert difference.std == pytest.approx(std)
    assert difference.low == pytest.approx(38 / 3 - T3 * std / math.sqrt(3))
    assert difference.count == 3


def test_paired_difference_uses_the_seeds_that_finished_in_both_rows():
    baseline = [PLAIN[2], run("plain", 1, status="unstable"), PLAIN[0], run("plain", 7, matrix(1, 1, 1))]
    ours = [EWC[1], EWC[2], run("ewc", 7, status="rejected", strength=10.0), EWC[0]]
    difference = summarize([*baseline, *ours], baseline="plain")[1].difference  # seeds 0 and 2: 10 and 10
    assert (difference.mean, difference.count) == (10.0, 2)
    ours[3] = run("ewc", 0, matrix(90, 84, 70), strength=10.0)  # 12 and 10
    difference = summarize([*baseline, *ours], baseline="plain")[1].difference
    assert difference.mean == pytest.approx(11)
    assert difference.high == pytest.approx(11 + T2 * math.sqrt(2) / math.sqrt(2))


def test_no_common_seeds_means_no_difference():
    rows = summarize([PLAIN[0], EWC[1]], baseline="plain")
    assert rows[0].difference.mean == 0.0
    assert rows[1].difference is None


def test_baseline_has_the_same_stream():
    other = [run("plain", s, matrix(9, 9, 9), data="1", stream="other") for s in range(3)]
    rows = summarize([*PLAIN, *other, *EWC, run("ewc", 0, matrix(9, 11, 9), data="2")], baseline="plain")
    assert rows[1].difference.mean == 0.0
    assert rows[2].difference.mean == pytest.approx(38 / 3)
    assert rows[3].difference is None


def test_baseline_uses_its_most_accurate_setting():
    worse = [run("plain", s, matrix(50, 20, 20), lr=0.9) for s in range(3)]
    for results in ([*PLAIN, *worse, *EWC], [*worse, *PLAIN, *EWC]):
        rows = {(row.setting.method, row.setting.lr): row for row in summarize(results, baseline="plain")}
        assert rows["ewc", 0.02].difference.mean == pytest.approx(38 / 3)
        assert rows["plain", 0.02].difference.mean == 0.0
        assert rows["plain", 0.9].difference.mean == pytest.approx(-45)


def test_methods_that_hold_buffers_are_compared_with_plain_and_joint_which_hold_none():
    held = [replace(result, spec=replace(result.spec, buffers="frozen")) for result in EWC]
    joint = [run("joint", seed, matrix(0, 95, 85)) for seed in range(3)]
    following, holding = (summarize([*PLAIN, *joint, *ewc], baseline="plain")[2] for ewc in (EWC, held))
    assert holding.setting.buffers == "frozen"
    assert holding.difference == following.difference
    assert holding.metrics["intransigence"] == following.metrics["intransigence"]


def test_versions_of_a_method_have_names_of_their_own_where_both_have_a_row_on_a_stream():
    specs = [("digits", "hm:M@1111"), ("digits", "hm:M@2222"), ("digits", "own:A@3333"), ("other", "hm:M@2222")]
    rows = summarize(run(name, 0, matrix(1, 1, 1), stream=stream, strength=0.5) for stream, name in specs)
    assert [row.label for row in rows] == ["hm:M@1111 0.5", "hm:M@2222 0.5", "own:A 0.5", "hm:M 0.5"]


def test_missing_baseline_raises_an_error():
    with pytest.raises(
        MooringError, match="the baseline 'joint' is not among the runs: they are of plain, ewc"
    ) as error:
        summarize([*PLAIN, *EWC], baseline="joint")
    assert "\n" not in str(error.value)


def test_unfinished_runs_are_in_the_verdict_and_not_in_the_metrics():
    results = [EWC[0], *(run("ewc", s, status="unstable", strength=10.0) for s in (1, 3)), EWC[2]]
    results.append(run("ewc", 4, status="rejected", strength=10.0))
    row = summarize(results)[0]
    assert row.metrics["accuracy"].count == 2
    assert row.metrics["accuracy"].mean == pytest.approx(75)
    assert row.verdict == "unstable in 2 of 5, rejected in 1 of 5"
    assert [result.spec.seed for result in row.unfinished] == [1, 3, 4]
    assert summarize(PLAIN)[0].verdict == ""


def test_row_without_finished_runs_has_no_metrics_and_no_difference():
    bad = [run("ewc", s, status="unstable", strength=10.0) for s in (0, 1)]
    rows = summarize([*PLAIN, *bad], baseline="plain")
    assert (rows[1].metrics, rows[1].difference) == ({}, None)
    assert summarize([*bad, *PLAIN], baseline="ewc")[1].difference is None


def test_row_to_json_has_null_for_nan():
    row = summarize([PLAIN[0], EWC[0]], baseline="plain")[1]
    values = json.loads(json.dumps(row.to_json(), allow_nan=False))
    assert values["metrics"]["accuracy"] == {"mean": 75.0, "std": None, "low": None, "high": None, "count": 1}
    assert values["difference"]["mean"] == 10.0
    assert (values["method"], values["strength"], values["seeds"], values["verdict"]) == ("ewc", 10.0, [0], "")
    assert "seed" not in values


def test_single_task_has_no_forgetting_of_earlier_tasks_and_no_transfer():
    spec = RunSpec("digits", "0", "plain", 0)
    (row,) = summarize([Result(spec, "finished", "", [10.0], [[90.0]])])
    assert list(row.metrics) == ["accuracy", "incremental", "forgetting", "learned"]
    assert row.to_record()["backward mean"] is None


def test_no_results_give_no_rows():
    assert summarize([]) == []


def test_result_metrics_equal_values_computed_by_hand():
    assert replace(PLAIN[0]).metrics == {
        "accuracy": 65.0,
        "incremental": (90 + 65) / 2,
        "forgetting_earlier": 40.0,
        "forgetting": 20.0,
        "learned": 85.0,
        "backward": -40.0,
        "forward": -10.0,
    }
    assert all(math.isnan(value) for value in run("ewc", 0, status="unstable").metrics.values())


def test_joint_training_has_an_accuracy_alone():
    joint = [run("joint", seed, matrix(60, 90, 90)) for seed in (0, 1)]
    (row,) = summarize(joint)
    assert list(row.metrics) == ["accuracy"]
    assert row.metrics["accuracy"].mean == 90
    assert list(row.to_json()["metrics"]) == ["accuracy"]


def test_intransigence_pairs_each_run_with_joint_training_of_its_seed():
    joint = [run("joint", 0, matrix(0, 95, 85)), run("joint", 2, matrix(0, 99, 71)), run("joint", 1, status="unstable")]
    plain, ewc, alone = summarize([*PLAIN, *EWC, *joint])
    paired = plain.metrics["intransigence"]
    # seed 0: ((95 - 90) + (85 - 80)) / 2; seed 2: ((99 - 94) + (71 - 70)) / 2
    assert (paired.count, paired.mean) == (2, (5 + 3) / 2)
    assert ewc.metrics["intransigence"].mean == ((5 + 15) / 2 + (5 + 11) / 2) / 2
    assert "intransigence" not in alone.metrics
    assert "intransigence" not in summarize(PLAIN)[0].metrics


def test_intransigence_with_a_growing_head_counts_the_classes_up_to_a_task():
    joint = replace(run("joint", 0, matrix(0, 80, 85)), joint=[97.0, 85.0])
    (plain, _) = summarize([PLAIN[0], joint])
    assert plain.metrics["intransigence"].mean == ((97 - 90) + (85 - 80)) / 2
