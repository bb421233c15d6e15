"""Tests of metrics against their definitions and against scipy."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from mooring.errors import MooringError
from mooring_lab.model import metrics
from mooring_lab.model.results import Result
from mooring_lab.model.spec import RunSpec

matrices = st.integers(1, 5).flatmap(
    lambda n: st.lists(st.lists(st.floats(0, 100, width=32), min_size=n, max_size=n), min_size=n, max_size=n)
)


@given(matrices)
def test_metrics_equal_their_definitions(rows):
    n, matrix = len(rows), torch.tensor(rows, dtype=torch.float64)
    best = [max(rows[i][k] for i in range(k, n)) for k in range(n)]
    assert metrics.average_accuracy(matrix) == pytest.approx(sum(rows[-1]) / n)
    assert metrics.average_forgetting(matrix) == pytest.approx(sum(best[k] - rows[-1][k] for k in range(n)) / n)
    assert metrics.learning_accuracy(matrix) == pytest.approx(sum(rows[k][k] for k in range(n)) / n)
    if n > 1:
        expected = sum(rows[-1][k] - rows[k][k] for k in range(n - 1)) / (n - 1)
        assert metrics.backward_transfer(matrix) == pytest.approx(expected)
        expected = sum(rows[k - 1][k] - 10 * k for k in range(1, n)) / (n - 1)
        untrained = torch.arange(n, dtype=torch.float64) * 10
        assert metrics.forward_transfer(matrix, untrained) == pytest.approx(expected)
        expected = sum(max(rows[i][k] for i in range(k, n - 1)) - rows[-1][k] for k in range(n - 1)) / (n - 1)
        assert metrics.forgetting_of_earlier_tasks(matrix) == pytest.approx(expected)
    assert metrics.average_incremental_accuracy(matrix) == pytest.approx(
        sum(sum(rows[i][: i + 1]) / (i + 1) for i in range(n)) / n
    )
    joint = [99.0 - k for k in range(n)]
    expected = sum(joint[k] - rows[k][k] for k in range(n)) / n
    assert metrics.intransigence(matrix, joint) == pytest.approx(expected, abs=1e-9)
    assert metrics.average_forgetting(matrix) >= 0


@given(matrices, st.integers(0, 5))
def test_metrics_do_not_need_entries_beyond_the_next_task(rows, full):
    """Older versions wrote full rows, so a continued study has both kinds."""
    spec = RunSpec("digits", "0", "plain", 0)
    short = [row if number < full else row[: number + 2] for number, row in enumerate(rows)]
    old, new = (Result(spec, "finished", "", [10.0] * len(rows), matrix) for matrix in (rows, short))
    assert new.metrics == pytest.approx(old.metrics, rel=0, abs=0, nan_ok=True)
    single = ("forgetting_earlier", "backward", "forward") if len(rows) == 1 else ()
    assert [name for name, value in new.metrics.items() if math.isnan(value)] == list(single)


def test_means_over_earlier_or_later_tasks_are_undefined_for_a_single_task():
    matrix = torch.tensor([[90.0]])
    assert math.isnan(metrics.forgetting_of_earlier_tasks(matrix))
    assert math.isnan(metrics.backward_transfer(matrix))
    assert math.isnan(metrics.forward_transfer(matrix, torch.tensor([10.0])))


def test_accuracy_before_training_does_not_count_as_best():
    assert metrics.average_forgetting(torch.tensor([[50.0, 99.0], [50.0, 60.0]])) == 0


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=9))
def test_interval_equals_students_t_interval(values):
    result = metrics.confidence_interval(values)
    assert result.mean == pytest.approx(sum(values) / len(values), abs=1e-9)
    if result.std > 1e-6:
        low, high = stats.t.interval(0.95, len(values) - 1, loc=result.mean, scale=stats.sem(values))
        assert (result.low, result.high) == pytest.approx((low, high), rel=1e-9, abs=1e-9)


def test_one_value_has_a_mean_and_no_interval():
    result = metrics.confidence_interval([3.0])
    assert (result.mean, result.count) == (3.0, 1)
    assert math.isnan(result.std)
    assert math.isnan(result.low)
    assert str(result) == "3.00"
    assert str(metrics.confidence_interval([1.0, 3.0])) == "2.00 ± 1.41"


def test_paired_difference_removes_the_variation_between_seeds():
    shared = [10.0, 50.0, 90.0, 30.0]
    result = metrics.paired_difference([s + 1.0 + 0.1 * i for i, s in enumerate(shared)], shared)
    assert result.mean == pytest.approx(1.15)
    assert result.low > 0.8


@pytest.mark.parametrize(
    "call",
    [
        lambda: metrics.average_accuracy(torch.zeros(2, 3)),
        lambda: metrics.average_forgetting(torch.zeros(0, 0)),
        lambda: metrics.forward_transfer(torch.zeros(2, 2), torch.zeros(3)),
        lambda: metrics.intransigence(torch.zeros(2, 2), [1.0]),
        lambda: metrics.confidence_interval([]),
        lambda: metrics.paired_difference([1.0], [1.0, 2.0]),
    ],
)
def test_invalid_input_raises_a_one_line_error(call):
    with pytest.raises(MooringError) as error:
        call()
    assert "\n" not in str(error.value)
