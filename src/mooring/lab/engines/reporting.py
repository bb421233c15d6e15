"""The interface by which a study reports its progress."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from mooring.lab.fleet.fleet import Fleet, Position
from mooring.lab.model.results import Result
from mooring.lab.model.spec import RunSpec

__all__ = ["FleetProgress", "Reporter", "SilentReporter"]


@dataclass(frozen=True)
class FleetProgress:
    """The progress of a fleet, as plain values that can be sent from another machine.

    Attributes:
        runs: how many runs it has.
        position: the task, epoch and step it has reached.
        steps: how many steps it has taken.
        tasks: how many tasks its stream has.
        accuracy: the mean accuracy of its runs on the finished tasks, in percent; None before the first is finished.

    Example:
        >>> FleetProgress(runs=2, position=Position(task=1), steps=18, tasks=5).accuracy is None
        True
    """

    runs: int
    position: Position
    steps: int
    tasks: int
    accuracy: float | None = None

    @classmethod
    def of(cls, fleet: Fleet) -> "FleetProgress":
        """Return the progress of a fleet now."""
        rows = [record.matrix[-1][: len(record.matrix)] for record in fleet.records if record.matrix]
        accuracy = sum(sum(row) / len(row) for row in rows) / len(rows) if rows else None
        return cls(len(fleet.specs), fleet.position, fleet.steps, len(fleet.stream.tasks), accuracy)


class Reporter(Protocol):
    """A receiver of the progress of a study."""

    def begin(self, fleets: Sequence[Sequence[RunSpec]], work: Sequence[int], done: int) -> None:
        """Receive the fleets to train, the run-steps of each, and how many runs have a result already."""

    def advanced(self, number: int, fleet: FleetProgress, done: int) -> None:
        """Receive the progress of a fleet; called at a limited rate.

        Args:
            number: which of the fleets.
            fleet: the progress of that fleet, or of the part of it that is trained now if it did not fit into memory.
            done: how many run-steps of the fleet are done. It decreases after memory ran out.
        """

    def finished(self, number: int, results: Sequence[Result]) -> None:
        """Receive the results of a fleet, once all of them are stored."""

    def note(self, line: str) -> None:
        """Receive a line that the user should read."""

    def close(self) -> None:
        """Stop reporting, whether the study finished or failed."""


class SilentReporter:
    """A reporter that does nothing."""

    def begin(self, fleets: Sequence[Sequence[RunSpec]], work: Sequence[int], done: int) -> None:
        """Do nothing."""

    def advanced(self, number: int, fleet: FleetProgress, done: int) -> None:
        """Do nothing."""

    def finished(self, number: int, results: Sequence[Result]) -> None:
        """Do nothing."""

    def note(self, line: str) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
