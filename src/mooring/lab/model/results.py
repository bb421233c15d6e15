"""What a run leaves behind."""

import math
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from mooring.lab.model import metrics
from mooring.lab.model.spec import RunSpec

__all__ = ["Result", "Stability", "Status"]

Status = Literal["finished", "unstable", "rejected"]


@dataclass(frozen=True)
class Stability:
    """What a penalty will do from here on, judged at a consolidation: p = lr * strength * importance, and verdicts.

    Attributes:
        task: how many tasks were consolidated.
        largest: the largest p of any parameter.
        safe_strength: the first strength at which a parameter would stop interpolating.
        free: parameters with p = 0.
        interpolate: with 0 < p < 1.
        extrapolate: from 1 up to where they diverge.
        diverge: beyond, or below 0.
        negative: those of `diverge` below 0.
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
        """Why the penalty does not interpolate everywhere; empty where it does.

        Example:
            >>> Stability(1, 2.5, 4.0, free=0, interpolate=9, extrapolate=1, diverge=0, negative=0).warning
            'after 1 task lr * strength * importance leaves (0, 1) in 1 of 10 parameters, up to 2.5; safe below 4'
        """
        beyond = self.extrapolate + self.diverge
        if not beyond:
            return ""
        every = f"{beyond:,} of {beyond + self.free + self.interpolate:,} parameters"
        negative = f" ({self.negative:,} below 0)" if self.negative else ""
        after = f"after {self.task} task{'s' if self.task > 1 else ''}"
        return (
            f"{after} lr * strength * importance leaves (0, 1) in {every}{negative}, "
            f"up to {self.largest:.3g}; safe below {self.safe_strength:.3g}"
        )


@dataclass(frozen=True)
class Result:
    """What came of one run. Accuracies are in percent.

    Attributes:
        spec: the run.
        status: "finished"; "unstable" where it diverged and was frozen; "rejected" where its strength was found too
            large after the first task.
        reason: one line, empty where it finished.
        untrained: accuracy on each task before any training.
        matrix: accuracy on task k after task i: on the tasks so far and the next one, which is all that metrics read.
            Rows of older studies go on to the last task; rows that an unstable run did not reach are missing.
        losses: for each task, the mean training loss over equal stretches of it.
        stability: one entry for each consolidation, for methods with a strength.
        importance: mean importance over past tasks by layer, at the end.
        drift: |theta - theta after the first task| / |theta after the first task| by layer, at the end.
        cka: debiased linear CKA to the model after the first task by layer, at the end.
        steps: iterations trained.
        seconds: its share of the time its fleet took.
        versions: of what made it: mooring, torch, python, device.
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
    steps: int = 0
    seconds: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def accuracies(self) -> Tensor:
        """The accuracy matrix as a tensor of shape (tasks, tasks), not a number where a task was not scored.

        Example:
            >>> spec = RunSpec(stream="digits", data="0", method="plain", seed=0)
            >>> rows = [[90.0, 10.0], [70.0, 80.0, 20.0], [60.0, 70.0, 90.0]]
            >>> Result(spec, "finished", "", [10.0] * 3, rows).accuracies[0]
            tensor([90., 10., nan], dtype=torch.float64)
        """
        widest = max(map(len, self.matrix), default=0)
        full = [row + [math.nan] * (widest - len(row)) for row in self.matrix]
        return torch.tensor(full, dtype=torch.float64)

    @cached_property
    def metrics(self) -> dict[str, float]:
        """Every metric by name; not a number where the run did not finish.

        Example:
            >>> spec = RunSpec(stream="digits", data="0", method="plain", seed=0)
            >>> found = Result(spec, "finished", "", [10.0, 10.0], [[90.0, 20.0], [70.0, 80.0]]).metrics
            >>> found["accuracy"], found["forgetting"], found["learned"]
            (75.0, 10.0, 85.0)
        """
        if self.status != "finished":
            return dict.fromkeys(("accuracy", "forgetting", "learned", "backward", "forward"), math.nan)
        matrix = self.accuracies
        return {
            "accuracy": metrics.average_accuracy(matrix),
            "forgetting": metrics.average_forgetting(matrix),
            "learned": metrics.learning_accuracy(matrix),
            "backward": metrics.backward_transfer(matrix),
            "forward": metrics.forward_transfer(matrix, torch.tensor(self.untrained, dtype=torch.float64)),
        }

    def to_json(self) -> dict[str, Any]:
        """As plain values; the lists are the result's own."""
        told = {each.name: getattr(self, each.name) for each in fields(self)}
        return {**told, "spec": self.spec.to_json(), "stability": [asdict(entry) for entry in self.stability]}

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> "Result":
        """From plain values.

        Example:
            >>> result = Result(RunSpec("digits", "0", "plain", 0), "finished", "", [10.0], [[90.0]])
            >>> Result.from_json(result.to_json()) == result
            True
        """
        spec = RunSpec.from_json(told["spec"])
        stability = [Stability(**entry) for entry in told["stability"]]
        return cls(**{**told, "spec": spec, "stability": stability})
