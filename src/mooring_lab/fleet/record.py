"""The measurements of runs while they train, and the results built from them."""

import platform
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

import mooring
from mooring_lab.model.results import Result, Stability, Status
from mooring_lab.model.spec import RunSpec

LOSS_INTERVALS = 20
"""Number of intervals into which the steps of a task are divided; the training loss is averaged over each."""


@dataclass
class RunRecord:
    """The measurements of one run so far; `Result` describes each of them."""

    spec: RunSpec
    untrained: list[float] = field(default_factory=list)
    matrix: list[list[float]] = field(default_factory=list)
    losses: list[list[float]] = field(default_factory=list)
    stability: list[Stability] = field(default_factory=list)

    def result(self, status: Status = "finished", reason: str = "", **final: Any) -> Result:
        """Build the run's result from this record and the values that are known only at the end."""
        measured = {name: value for name, value in vars(self).items() if name != "spec"}
        return Result(self.spec, status, reason, **measured, **final)

    def for_run(self, spec: RunSpec) -> "RunRecord":
        """Copy the measurements so far into the record of another run."""
        return RunRecord(spec, list(self.untrained), list(self.matrix), list(self.losses), list(self.stability))

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "RunRecord":
        """Build a record from plain values.

        Example:
            >>> record = RunRecord(RunSpec("digits", "0", "plain", 0), matrix=[[90.0]])
            >>> RunRecord.from_json(record.to_json()) == record
            True
        """
        stability = [Stability(**entry) for entry in values["stability"]]
        return cls(**{**values, "spec": RunSpec.from_json(values["spec"]), "stability": stability})


def versions(device: str) -> dict[str, str]:
    """Return the software and hardware that a result was made with, and whether deterministic algorithms were on.

    Example:
        >>> sorted(versions("cpu"))
        ['device', 'mooring', 'python', 'threads', 'torch']
    """
    deterministic = {"deterministic": "yes"} if torch.are_deterministic_algorithms_enabled() else {}
    return {**_versions(device), **deterministic}


@cache
def _versions(device: str) -> dict[str, str]:
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else f"cpu ({platform.machine()})"
    return {
        "mooring": mooring.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": name,
        "threads": str(torch.get_num_threads()),
    }


class LossHistory:
    """Sums of the losses in each interval of a task, on the device.

    Args:
        runs: the number of runs.
        device: where the sums are stored.

    Attributes:
        sums: float64 of shape (runs, LOSS_INTERVALS).

    Example:
        >>> history = LossHistory(1)
        >>> for step in range(3):
        ...     history.add(torch.tensor([step]), 3, torch.tensor([float(step)]))
        >>> history.means(3)
        [[0.0, 1.0, 2.0]]
    """

    def __init__(self, runs: int, device: torch.device | str = "cpu") -> None:
        self.sums = torch.zeros(runs, LOSS_INTERVALS, dtype=torch.float64, device=device)

    def add(self, step: Tensor, steps: int, losses: Tensor) -> None:
        """Add the losses of one step.

        Args:
            step: the number of the step within the task, int64 of shape (1,).
            steps: the number of steps in the task.
            losses: of shape (runs,).
        """
        self.sums.index_add_(1, step * LOSS_INTERVALS // steps, losses.double().unsqueeze(1))

    def means(self, steps: int) -> list[list[float]]:
        """Return the mean loss of each run in each interval that contains steps."""
        counts = torch.bincount(torch.arange(steps) * LOSS_INTERVALS // steps, minlength=LOSS_INTERVALS)
        filled = counts.nonzero().flatten()
        means: list[list[float]] = (self.sums.cpu()[:, filled] / counts[filled]).tolist()
        return means

    def keep(self, rows: Tensor) -> None:
        """Keep only the runs in these rows."""
        self.sums = self.sums[rows]
