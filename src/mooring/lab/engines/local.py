"""The local engine: one fleet after the other, in this process."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mooring.lab.engines.checkpoint_index import CheckpointIndex
from mooring.lab.engines.runner import FleetRunner, RunContext
from mooring.lab.engines.signals import stop_on_signal
from mooring.lab.engines.sizing import FleetSizer
from mooring.lab.model.results import Result
from mooring.lab.model.spec import RunSpec

__all__ = ["LocalEngine"]


@dataclass
class LocalEngine:
    """An engine that trains fleets one after the other.

    Args:
        context: what every fleet of the study shares.
        folder: the folder of checkpoints.

    Example:
        >>> LocalEngine(RunContext({}, {}), Path("study.sqlite.fleets")).run([], print)
    """

    context: RunContext
    folder: Path

    def fleet_sizes(self, specs: Sequence[RunSpec]) -> Callable[[list[RunSpec]], int]:
        """Return the sizes that fit into this machine's memory and are fastest; see `Engine`."""
        context = self.context
        return FleetSizer(
            context.streams, context.weights, context.device, context.reporter.note, fixed=context.deterministic
        )

    def run(
        self, fleets: Sequence[Sequence[RunSpec]], keep: Callable[[list[Result]], None], *, reject: bool = False
    ) -> None:
        """Train every fleet, one after the other; see `Engine`."""
        index = CheckpointIndex(self.folder, self.context.device, reject, self.context.deterministic)

        def keep_and_delete(results: list[Result], path: Path) -> None:
            keep(results)
            path.unlink(missing_ok=True)

        with stop_on_signal() as stop:
            for number, specs in enumerate(fleets):
                results = FleetRunner(self.context, number, specs, index, stop).run(keep_and_delete)
                self.context.reporter.finished(number, results)
