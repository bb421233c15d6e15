"""The result of a run."""

import math
import re
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from mooring_lab.model import metrics
from mooring_lab.model.metric_definitions import DEFINITIONS
from mooring_lab.model.spec import RunSpec

Status = Literal["finished", "unstable", "rejected"]

METRICS = tuple(name for name in DEFINITIONS if name != "intransigence")
"""The names of the metrics of a single run, in the order of tables and files; intransigence compares two runs."""


@dataclass(frozen=True)
class Stability:
    """The stability of a penalty at a consolidation, from p = lr * strength * importance of every parameter.

    Attributes:
        task: the number of consolidated tasks.
        largest: the largest p of any parameter.
        safe_strength: the smallest strength at which a parameter stops interpolating.
        free: the number of parameters with p = 0.
        interpolate: the number with 0 < p < 1.
        extrapolate: the number with p from 1 up to where the step diverges.
        diverge: the number with p beyond that, or below 0.
        negative: the number with p below 0, which are part of `diverge`.
    """

    task: int
    largest: float
    safe_strength: float
    free: int
    interpolate: int
    extrapolate: int
    diverge: int
    negative: int

    @property
    def warning(self) -> str:
        """Why the penalty does not interpolate all parameters; empty if it does.

        Example:
            >>> Stability(1, 2.5, 4.0, free=0, interpolate=9, extrapolate=1, diverge=0, negative=0).warning
            'after 1 task lr * strength * importance leaves (0, 1) in 1 of 10 parameters, up to 2.5; safe below 4'
        """
        beyond = self.extrapolate + self.diverge
        if not beyond:
            return ""
        parameters = f"{beyond:,} of {beyond + self.free + self.interpolate:,} parameters"
        negative = f" ({self.negative:,} below 0)" if self.negative else ""
        after = f"after {self.task} task{'s' if self.task > 1 else ''}"
        return (
            f"{after} lr * strength * importance leaves (0, 1) in {parameters}{negative}, "
            f"up to {self.largest:.3g}; safe below {self.safe_strength:.3g}"
        )


@dataclass(frozen=True)
class Result:
    """The result of one run. Accuracies are in percent.

    Attributes:
        spec: the run's specification.
        status: "finished"; "unstable" if it diverged and was frozen; "rejected" if its strength proved too large after
            the first task.
        reason: why it did not finish, in one line; empty if it finished.
        untrained: the accuracy on each task before any training.
        matrix: row i has the accuracies after task i, on the tasks so far and on the next one; metrics read no more.
            Rows of older studies continue to the last task. Rows that an unstable run did not reach are missing.
        losses: for each task, the mean training loss over equal parts of it.
        stability: one entry for each consolidation, for methods with a strength.
        importance: the mean importance over previous tasks by layer, at the end.
        drift: |theta - theta after the first task| / |theta after the first task| by layer, at the end.
        cka: the debiased linear CKA to the model after the first task by layer, at the end.
        joint: of joint training, the final accuracy on each task, which `intransigence` refers to; a growing head is
            scored among the classes up to that task. Empty for other methods.
        scenario: "task", "class" or "domain"; see `mooring_lab.model.scenarios`.
        steps: the number of training iterations.
        seconds: the run's share of its fleet's time.
        versions: the versions of mooring, torch and python, and the device.
    """

    spec: RunSpec
    status: Status
    reason: str
    untrained: list[float]
    matrix: list[list[float]]
    losses: list[list[float]] = field(default_factory=list)
    stability: list[Stability] = field(default_factory=list)
    importance: dict[str, float] = field(default_factory=dict)
    drift: dict[str, float] = field(default_factory=dict)
    cka: dict[str, float] = field(default_factory=dict)
    joint: list[float] = field(default_factory=list)
    scenario: str = "task"
    steps: int = 0
    seconds: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def is_joint(self) -> bool:
        """Whether all tasks were trained at once."""
        return bool(self.joint) or self.spec.method == "joint"

    @property
    def accuracies(self) -> Tensor:
        """The accuracy matrix as a tensor of shape (tasks, tasks), with NaN where a task was not evaluated.

        Example:
            >>> spec = RunSpec(stream="digits", data="0", method="plain", seed=0)
            >>> rows = [[90.0, 10.0], [70.0, 80.0, 20.0], [60.0, 70.0, 90.0]]
            >>> Result(spec, "finished", "", [10.0] * 3, rows).accuracies[0]
            tensor([90., 10., nan], dtype=torch.float64)
        """
        width = max(map(len, self.matrix), default=0)
        padded = [row + [math.nan] * (width - len(row)) for row in self.matrix]
        return torch.tensor(padded, dtype=torch.float64)

    @cached_property
    def metrics(self) -> dict[str, float]:
        """The metrics by name; all NaN if the run did not finish.

        With a single task, those over earlier or later tasks are NaN.

        Joint training has an accuracy alone: its tasks are learned all the time, so nothing is learned after or
        forgotten since. `intransigence` refers to another run, and is that of a `Row`.

        Example:
            >>> spec = RunSpec(stream="digits", data="0", method="plain", seed=0)
            >>> metrics = Result(spec, "finished", "", [10.0, 10.0], [[90.0, 20.0], [70.0, 80.0]]).metrics
            >>> metrics["accuracy"], metrics["forgetting"], metrics["learned"]
            (75.0, 10.0, 85.0)
        """
        undefined = dict.fromkeys(METRICS, math.nan)
        if self.status != "finished":
            return undefined
        matrix = self.accuracies
        accuracy = {"accuracy": metrics.average_accuracy(matrix)}
        if self.is_joint:
            return {**undefined, **accuracy}
        return {
            **undefined,
            **accuracy,
            "incremental": metrics.average_incremental_accuracy(matrix),
            "forgetting_earlier": metrics.forgetting_of_earlier_tasks(matrix),
            "forgetting": metrics.average_forgetting(matrix),
            "learned": metrics.learning_accuracy(matrix),
            "backward": metrics.backward_transfer(matrix),
            "forward": metrics.forward_transfer(matrix, torch.tensor(self.untrained, dtype=torch.float64)),
        }

    def to_json(self) -> dict[str, Any]:
        """Return JSON-serializable values; the lists are shared with the result."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**values, "spec": self.spec.to_json(), "stability": [asdict(entry) for entry in self.stability]}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Result":
        """Return the result that `to_json` described.

        Example:
            >>> result = Result(RunSpec("digits", "0", "plain", 0), "finished", "", [10.0], [[90.0]])
            >>> Result.from_json(result.to_json()) == result
            True
        """
        spec = RunSpec.from_json(values["spec"])
        stability = [Stability(**entry) for entry in values["stability"]]
        return cls(**{"scenario": _unnamed_scenario(spec.stream), **values, "spec": spec, "stability": stability})


def _unnamed_scenario(stream: str) -> str:
    """Return the scenario of a result that was stored before scenarios had names: it followed from the stream's cut."""
    return "domain" if re.search(r"\(\d+ (permutations|rotations)", stream) else "task"
