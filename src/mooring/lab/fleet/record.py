"""What is written down about a run while it sails, and the result made of it."""

import platform
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

import torch

import mooring
from mooring.lab.model.results import Result, Stability, Status
from mooring.lab.model.spec import RunSpec

__all__ = ["Logbook", "versions"]


@dataclass
class Logbook:
    """The measurements of one run so far; see `Result` for what each is."""

    spec: RunSpec
    untrained: list[float] = field(default_factory=list)
    matrix: list[list[float]] = field(default_factory=list)
    losses: list[list[float]] = field(default_factory=list)
    stability: list[Stability] = field(default_factory=list)

    def result(self, status: Status = "finished", reason: str = "", **rest: Any) -> Result:
        """The run's result, from what is written here and what is known at the end."""
        return Result(
            self.spec,
            status,
            reason,
            untrained=self.untrained,
            matrix=self.matrix,
            losses=self.losses,
            stability=self.stability,
            **rest,
        )

    @property
    def warning(self) -> str:
        """What the last verdict has against the run's penalty; nothing where there was none."""
        return self.stability[-1].warning if self.stability else ""

    def of(self, spec: RunSpec) -> "Logbook":
        """The same measurements so far, as another run's."""
        kept = (self.untrained, self.matrix, self.losses, self.stability)
        return Logbook(spec, *(list(each) for each in kept))  # type: ignore[arg-type]

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> "Logbook":
        """From plain values.

        Example:
            >>> book = Logbook(RunSpec("digits", "0", "plain", 0), matrix=[[90.0]])
            >>> Logbook.from_json(book.to_json()) == book
            True
        """
        stability = [Stability(**entry) for entry in told["stability"]]
        return cls(**{**told, "spec": RunSpec.from_json(told["spec"]), "stability": stability})


def versions(device: str) -> dict[str, str]:
    """What makes a result, by name; also that it is the same each time, where that was asked for.

    Example:
        >>> sorted(versions("cpu"))
        ['device', 'mooring', 'python', 'threads', 'torch']
    """
    same = {"deterministic": "yes"} if torch.are_deterministic_algorithms_enabled() else {}
    return {**_versions(device), **same}


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
