"""How far a fleet has come."""

from dataclasses import dataclass

__all__ = ["Position"]


@dataclass(frozen=True)
class Position:
    """How far a fleet has come: the step that comes next, of an epoch, of a task."""

    task: int = 0
    epoch: int = 0
    step: int = 0
