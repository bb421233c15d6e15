"""How far a fleet has come, and who follows it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from mooring.lab.fleet.fleet import Fleet

__all__ = ["Position", "Watcher"]


@dataclass(frozen=True)
class Position:
    """How far a fleet has come: the step that comes next, of an epoch, of a task."""

    task: int = 0
    epoch: int = 0
    step: int = 0


class Watcher(Protocol):
    """Who follows a fleet from outside."""

    def look(self, fleet: "Fleet") -> None:
        """Called between any two steps; may save the fleet, or raise to stop it."""

    def harbour(self, fleet: "Fleet") -> None:
        """Called after each task."""
