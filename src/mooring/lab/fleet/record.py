"""The measurements of a run while it trains, and the result built from them."""

import platform
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

import torch

import mooring
from mooring.lab.model.results import Result, Stability, Status
from mooring.lab.model.spec import RunSpec

__all__ = ["RunRecord", "versions"]


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
        return Result(
            self.spec,
            status,
            reason,
            untrained=self.untrained,
            matrix=self.matrix,
            losses=self.losses,
            stability=self.stability,
            **final,
        )

    @property
    def warning(self) -> str:
        """Return the problem that the last stability verdict found with the penalty, or an empty string."""
        return self.stability[-1].warning if self.stability else ""

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
