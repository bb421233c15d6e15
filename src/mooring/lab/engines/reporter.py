"""Who is told how a study gets on."""

from collections.abc import Sequence
from typing import Protocol

from mooring.lab.fleet.fleet import Fleet
from mooring.lab.results import Result
from mooring.lab.spec import RunSpec

__all__ = ["Reporter", "Silent"]


class Reporter(Protocol):
    """Who is told how a study gets on."""

    def begin(self, fleets: Sequence[Sequence[RunSpec]], work: Sequence[int], done: int) -> None:
        """The fleets to run, how many run-steps each is, and how many runs were done before."""

    def sailing(self, number: int, fleet: Fleet, done: int) -> None:
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

    def sailing(self, number: int, fleet: Fleet, done: int) -> None:
        """Nothing."""

    def finished(self, number: int, results: Sequence[Result]) -> None:
        """Nothing."""

    def note(self, line: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""
