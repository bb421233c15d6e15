"""The local engine: one fleet after the other on this machine, saved as they go."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mooring.lab.engines.checkpoint_index import Unfinished
from mooring.lab.engines.runner import Aboard, Voyage
from mooring.lab.engines.signals import stoppable
from mooring.lab.engines.sizing import Sizes
from mooring.lab.model.results import Result
from mooring.lab.model.spec import RunSpec

__all__ = ["Local"]


@dataclass
class Local:
    """Runs fleets one after the other.

    Args:
        aboard: what every fleet takes along.
        folder: where checkpoints go.

    Example:
        >>> Local(Aboard({}, {}), Path("study.sqlite.fleets")).run([], print)
    """

    aboard: Aboard
    folder: Path

    def sizes(self, specs: Sequence[RunSpec]) -> Callable[[list[RunSpec]], int]:
        """How many of the runs of a shape sail together, of all these: as fits this machine, and as is fastest."""
        aboard = self.aboard
        told = aboard.streams, aboard.weights, aboard.device, aboard.reporter.note
        return Sizes(*told, fixed=aboard.deterministic)

    def run(
        self, fleets: Sequence[Sequence[RunSpec]], keep: Callable[[list[Result]], None], *, reject: bool = False
    ) -> None:
        """Run every fleet, one after the other; see `Engine`."""
        unfinished = Unfinished(self.folder, self.aboard.device, reject, self.aboard.deterministic)

        def put_away(results: list[Result], path: Path) -> None:
            keep(results)
            path.unlink(missing_ok=True)

        with stoppable() as stop:
            for number, specs in enumerate(fleets):
                voyage = Voyage(self.aboard, number, specs, unfinished, stop)
                self.aboard.reporter.finished(number, voyage.results(put_away))
