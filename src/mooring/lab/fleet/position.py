"""The position of a fleet in its stream."""

from dataclasses import dataclass

__all__ = ["Position"]


@dataclass(frozen=True)
class Position:
    """The next step of a fleet, as task, epoch and step within the epoch."""

    task: int = 0
    epoch: int = 0
    step: int = 0
