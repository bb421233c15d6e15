"""Callbacks that follow a fleet, and its position in the stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from mooring_lab.fleet.fleet import Fleet


@dataclass(frozen=True)
class Position:
    """The next step of a fleet, as task, epoch and step within the epoch."""

    task: int = 0
    epoch: int = 0
    step: int = 0


class FleetCallback(Protocol):
    """A callback that follows a fleet."""

    def on_step(self, fleet: Fleet) -> None:
        """Run between two steps; may save the fleet, or raise to stop it."""

    def on_task_end(self, fleet: Fleet) -> None:
        """Run after each task."""
