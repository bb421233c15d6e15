"""Who is told how a study gets on."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from mooring.lab.fleet.fleet import Fleet
from mooring.lab.fleet.position import Position
from mooring.lab.model.results import Result
from mooring.lab.model.spec import RunSpec

__all__ = ["Reporter", "Seen", "Silent"]


@dataclass(frozen=True)
class Seen:
    """What is seen of a fleet from outside, also from another machine.

    Attributes:
        runs: how many it has.
        position: where it is.
        steps: how many are behind it.
        tasks: how many there are.
        accuracy: in percent on the tasks behind it, the mean of its runs; None before the first.

    Example:
        >>> Seen(runs=2, position=Position(task=1), steps=18, tasks=5).accuracy is None
        True
    """

    runs: int
    position: Position
    steps: int
    tasks: int
    accuracy: float | None = None

    @classmethod
    def of(cls, fleet: Fleet) -> "Seen":
        """What is seen of this one now."""
        rows = [record.matrix[-1][: len(record.matrix)] for record in fleet.records if record.matrix]
        accuracy = sum(sum(row) / len(row) for row in rows) / len(rows) if rows else None
        return cls(len(fleet.specs), fleet.position, fleet.steps, len(fleet.stream.tasks), accuracy)


class Reporter(Protocol):
    """Who is told how a study gets on."""

    def begin(self, fleets: Sequence[Sequence[RunSpec]], work: Sequence[int], done: int) -> None:
        """The fleets to run, how many run-steps each is, and how many runs were done before."""

    def sailing(self, number: int, fleet: Seen, done: int) -> None:
        """A fleet has come further; at a bounded rate.

        Args:
            number: which of the fleets.
            fleet: what sails now: that fleet, or a part of it where it did not fit into memory.
            done: how many of the fleet's run-steps are behind it. It goes back where memory ran out.
        """

    def finished(self, number: int, results: Sequence[Result]) -> None:
        """All of a fleet's results are kept."""

    def note(self, line: str) -> None:
        """Something a user should know."""

    def close(self) -> None:
        """It is over, one way or another."""


class Silent:
    """Tells nobody."""

    def begin(self, fleets: Sequence[Sequence[RunSpec]], work: Sequence[int], done: int) -> None:
        """Nothing."""

    def sailing(self, number: int, fleet: Seen, done: int) -> None:
        """Nothing."""

    def finished(self, number: int, results: Sequence[Result]) -> None:
        """Nothing."""

    def note(self, line: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""
