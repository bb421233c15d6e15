"""The interface of an engine, the local engine, and the choice of an engine by name."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mooring.errors import MooringError, check_number, unknown
from mooring_lab.engines.checkpoint_index import CheckpointIndex
from mooring_lab.engines.device_memory import free_memory
from mooring_lab.engines.runner import FleetRunner, KeepResults, RunContext
from mooring_lab.engines.signals import stop_on_signal
from mooring_lab.engines.sizing import fleet_sizes
from mooring_lab.model.results import Result
from mooring_lab.model.spec import RunSpec

ENGINES = ("local", "ray")


class Engine(Protocol):
    """Something that trains fleets."""

    def fleet_sizes(self, specs: Sequence[RunSpec]) -> Callable[[list[RunSpec]], int]:
        """Return a function from runs of one shape to how many of them to train together.

        Args:
            specs: all runs of the study that have to be trained.
        """

    def run(self, fleets: Sequence[Sequence[RunSpec]], keep: KeepResults, *, reject: bool = False) -> None:
        """Train every fleet to the end of its stream, from its checkpoint if it has one.

        Args:
            fleets: the runs of each fleet.
            keep: stores the results of a fleet, or of a part of it; then the checkpoint is deleted.
            reject: stop runs whose penalty does not interpolate after the first task.
        """


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
        """Return the sizes that fit into this machine's memory; see `Engine`."""
        own = self.context
        return fleet_sizes(own.streams, own.device, None if own.deterministic else lambda: free_memory(own.device))

    def run(self, fleets: Sequence[Sequence[RunSpec]], keep: KeepResults, *, reject: bool = False) -> None:
        """Train every fleet, one after the other; see `Engine`."""
        index = CheckpointIndex(self.folder, self.context.device, reject, self.context.deterministic)

        def keep_and_delete(results: list[Result], path: Path) -> None:
            keep(results)
            path.unlink(missing_ok=True)

        with stop_on_signal() as stop:
            for number, specs in enumerate(fleets):
                results = FleetRunner(self.context, number, specs, index, stop).run(keep_and_delete)
                self.context.reporter.finished(number, results)


def check_engine(name: str, address: str | None = None, share: float = 1.0) -> None:
    """Refuse an engine that does not exist, or options that it does not take, before any work.

    Example:
        >>> check_engine("lokal")
        Traceback (most recent call last):
        ...
        mooring.errors.MooringError: unknown engine 'lokal' (did you mean 'local'?); allowed: local, ray
    """
    if name not in ENGINES:
        raise unknown("engine", name, ENGINES)
    if name == "ray":
        from mooring_lab.engines.ray import import_ray

        import_ray()
    check_number("share", share, 0.01, 1)
    if name != "ray" and address is not None:
        raise MooringError(f"--address {address} is for --engine ray: give that too, or leave the address out")
    if name != "ray" and share != 1:
        raise MooringError(f"--share {share:g} is for --engine ray: give that too, or leave the share out")


def open_engine(name: str, context: RunContext, folder: Path, address: str | None = None, share: float = 1.0) -> Engine:
    """Return the engine of that name.

    Args:
        name: "local" or "ray".
        context: what every fleet of the study shares.
        folder: the folder of checkpoints.
        address: the address of a Ray cluster; None starts one on this machine.
        share: the part of a core or of a GPU that a fleet takes, with Ray.

    Example:
        >>> type(open_engine("local", RunContext({}, {}), Path("study.sqlite.fleets"))).__name__
        'LocalEngine'
    """
    check_engine(name, address, share)
    if name == "local":
        return LocalEngine(context, folder)
    from mooring_lab.engines.ray import RayEngine

    return RayEngine(context, folder, address, share)
