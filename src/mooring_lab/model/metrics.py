"""Metrics of an accuracy matrix, and their confidence intervals over seeds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import torch
from scipy.special import stdtrit

from mooring.errors import MooringError

SCORE_TOLERANCE = 1e-9
"""Percentage points within which two scores are equal; they are sums of fractions that floats round."""


def average_accuracy(matrix: torch.Tensor) -> float:
    """Return the final model's mean test accuracy over all tasks: mean_k a[last, k].

    Args:
        matrix: a[i, k] is the accuracy on task k after training on task i, of shape (tasks, tasks). No metric reads
            the entries with k > i + 1.

    Example:
        >>> average_accuracy(torch.tensor([[90.0, 20.0], [70.0, 80.0]]))
        75.0
    """
    return fmean(_rows(matrix)[-1])


def average_forgetting(matrix: torch.Tensor) -> float:
    """Return the mean loss of each task's best accuracy: mean_k (max_{i >= k} a[i, k] - a[last, k]).

    The best accuracy is taken from the end of the task's own training on. The last task contributes 0.

    Example:
        >>> average_forgetting(torch.tensor([[90.0, 20.0], [70.0, 80.0]]))
        10.0
    """
    rows = _rows(matrix)
    return fmean(max(row[k] for row in rows[k:]) - last for k, last in enumerate(rows[-1]))


def forgetting_of_earlier_tasks(matrix: torch.Tensor) -> float:
    """Return the mean loss of earlier tasks: mean_{k < last} (max_{k <= i < last} a[i, k] - a[last, k]).

    It is the forgetting measure of Chaudhry et al., 2018, and the usual convention: the last task, which nothing
    followed, does not count. It is negative for a task that ends better than ever. The result is NaN for a single task.

    Example:
        >>> forgetting_of_earlier_tasks(torch.tensor([[90.0, 20.0], [70.0, 80.0]]))
        20.0
    """
    rows = _rows(matrix)
    earlier = range(len(rows) - 1)
    return fmean(max(row[k] for row in rows[k:-1]) - rows[-1][k] for k in earlier) if earlier else math.nan


def average_incremental_accuracy(matrix: torch.Tensor) -> float:
    """Return the mean over tasks i of the average accuracy on the tasks so far: mean_i mean_{k <= i} a[i, k].

    Example:
        >>> average_incremental_accuracy(torch.tensor([[90.0, 20.0], [70.0, 80.0]]))
        82.5
    """
    return fmean(fmean(row[: k + 1]) for k, row in enumerate(_rows(matrix)))


def intransigence(matrix: torch.Tensor, joint: Sequence[float]) -> float:
    """Return what joint training learned of each task and the method did not: mean_k (joint[k] - a[k, k]).

    Args:
        matrix: the accuracy matrix.
        joint: the final accuracy of joint training on each task.

    Example:
        >>> intransigence(torch.tensor([[90.0, 20.0], [70.0, 80.0]]), [95.0, 85.0])
        5.0
    """
    rows = _rows(matrix)
    if len(joint) != len(rows):
        raise MooringError(f"joint has {len(joint)} accuracies: give one for each of {len(rows)} tasks")
    return fmean(reference - row[k] for k, (row, reference) in enumerate(zip(rows, joint, strict=True)))


def learning_accuracy(matrix: torch.Tensor) -> float:
    """Return the mean accuracy on each task right after its training: mean_k a[k, k].

    Example:
        >>> learning_accuracy(torch.tensor([[90.0, 20.0], [70.0, 80.0]]))
        85.0
    """
    return fmean(row[k] for k, row in enumerate(_rows(matrix)))


def backward_transfer(matrix: torch.Tensor) -> float:
    """Return the effect of later tasks on earlier ones: mean_{k < last} (a[last, k] - a[k, k]).

    Negative values mean forgetting. The result is NaN for a single task.

    Example:
        >>> backward_transfer(torch.tensor([[90.0, 20.0], [70.0, 80.0]]))
        -20.0
    """
    rows = _rows(matrix)
    return fmean(rows[-1][k] - row[k] for k, row in enumerate(rows[:-1])) if len(rows) > 1 else math.nan


def forward_transfer(matrix: torch.Tensor, untrained: torch.Tensor) -> float:
    """Return the effect of earlier tasks on later ones: mean_{k > 0} (a[k - 1, k] - untrained[k]).

    The result is NaN for a single task.

    Args:
        matrix: the accuracy matrix; row k - 1 must have the accuracy on task k.
        untrained: the accuracy on each task before any training, of shape (tasks,).

    Example:
        >>> forward_transfer(torch.tensor([[90.0, 20.0], [70.0, 80.0]]), torch.tensor([10.0, 10.0]))
        10.0
    """
    rows = _rows(matrix)
    if untrained.shape != matrix.shape[:1]:
        shape = tuple(untrained.shape)
        raise MooringError(f"untrained has shape {shape}: give one accuracy for each of {len(rows)} tasks")
    before = untrained.tolist()
    return fmean(row[k] - before[k] for k, row in enumerate(rows[:-1], start=1)) if len(rows) > 1 else math.nan


@dataclass(frozen=True)
class Interval:
    """The mean, standard deviation and confidence interval (Student's t) of a metric over seeds.

    With one seed, std, low and high are NaN.
    """

    mean: float
    std: float
    low: float
    high: float
    count: int

    def within(self, lowest: float, highest: float) -> "Interval":
        """Return the interval cut at the bounds of the metric: beyond them it holds nothing that the mean can be.

        Example:
            >>> confidence_interval([99.0, 100.0]).within(0, 100).high
            100
        """
        if math.isnan(self.low):
            return self
        return replace(self, low=max(self.low, lowest), high=min(self.high, highest))

    def as_difference(self, spec: str = "+.2f") -> str:
        """Return the mean with its sign and, if there are two seeds or more, the interval.

        Example:
            >>> confidence_interval([1.0, 2.0, 3.0]).as_difference(), confidence_interval([1.0]).as_difference()
            ('+2.00 [-0.48, +4.48]', '+1.00')
        """
        bounds = f" [{self.low:{spec}}, {self.high:{spec}}]" if self.count > 1 else ""
        return f"{self.mean:{spec}}{bounds}"

    def __str__(self) -> str:
        return f"{self.mean:.2f}" if self.count < 2 else f"{self.mean:.2f} ± {self.std:.2f}"


def confidence_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Return the mean, the standard deviation (n - 1) and the interval of the mean: mean ± t * std / sqrt(n).

    Example:
        >>> accuracy = confidence_interval([1.0, 2.0, 3.0])
        >>> accuracy.mean, accuracy.std, round(accuracy.low, 3), round(accuracy.high, 3)
        (2.0, 1.0, -0.484, 4.484)
    """
    if not values:
        raise MooringError("a confidence interval needs at least one value: no run has finished")
    count, mean = len(values), math.fsum(values) / len(values)
    if count == 1:
        return Interval(mean, math.nan, math.nan, math.nan, 1)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
    half = float(stdtrit(count - 1, (1 + confidence) / 2)) * std / math.sqrt(count)
    return Interval(mean, std, mean - half, mean + half, count)


def paired_difference(values: Sequence[float], baseline: Sequence[float], confidence: float = 0.95) -> Interval:
    """Return the interval of value - baseline, paired by seed, which removes the variation between seeds.

    Example:
        >>> paired_difference([11.0, 22.0, 33.0], [10.0, 20.0, 30.0]).mean
        2.0
    """
    if len(values) != len(baseline):
        counts = f"{len(values)} and {len(baseline)}"
        raise MooringError(f"a paired difference needs the same seeds on both sides, not {counts}")
    return confidence_interval([value - other for value, other in zip(values, baseline, strict=True)], confidence)


def _rows(matrix: torch.Tensor) -> list[list[float]]:
    """Return the rows as Python floats; a report has thousands of small matrices, for which tensors are slow."""
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not len(matrix):
        raise MooringError(f"an accuracy matrix has shape (tasks, tasks), not {tuple(matrix.shape)}")
    return matrix.tolist()
