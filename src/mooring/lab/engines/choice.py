"""Which engine runs a study."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from mooring.errors import MooringError, check_number, unknown
from mooring.lab.engines.local import Local
from mooring.lab.engines.runner import Aboard
from mooring.lab.model.results import Result
from mooring.lab.model.spec import RunSpec

__all__ = ["ENGINES", "Engine", "check_engine", "engine"]

ENGINES = ("local", "ray")


class Engine(Protocol):
    """What runs fleets."""

    def sizes(self, specs: Sequence[RunSpec]) -> Callable[[list[RunSpec]], int]:
        """How many of the runs of a shape sail together, of all these."""

    def run(
        self, fleets: Sequence[Sequence[RunSpec]], keep: Callable[[list[Result]], None], *, reject: bool = False
    ) -> None:
        """Run every fleet to its end, from its checkpoint where it has one.

        Args:
            fleets: the runs.
            keep: called with the results of each fleet, or of each part of it, to put them away; their checkpoint is
                deleted after that.
            reject: take out runs whose penalty does not interpolate after the first task.
        """


def check_engine(name: str, address: str | None = None, share: float = 1.0) -> None:
    """Refuse an engine that is not there, before any work.

    Example:
        >>> check_engine("lokal")
        Traceback (most recent call last):
        ...
        mooring.errors.MooringError: unknown engine 'lokal' (did you mean 'local'?); allowed: local, ray
    """
    if name not in ENGINES:
        raise unknown("engine", name, ENGINES)
    if name == "ray":
        from mooring.lab.engines.ray import installed

        installed()
    check_number("share", share, 0.01, 1)
    if name != "ray" and address is not None:
        raise MooringError(f"--address {address} is for --engine ray: give that too, or leave the address out")
    if name != "ray" and share != 1:
        raise MooringError(f"--share {share:g} is for --engine ray: give that too, or leave the share out")


def engine(
    name: str,
    aboard: Aboard,
    folder: Path,
    address: str | None = None,
    share: float = 1.0,
) -> Engine:
    """The engine of that name.

    Args:
        name: "local" or "ray".
        aboard: what every fleet takes along.
        folder: where checkpoints go.
        address: of a Ray cluster; None for one on this machine.
        share: what part of a core or of a GPU a fleet takes there.

    Example:
        >>> type(engine("local", Aboard({}, {}), Path("study.sqlite.fleets"))).__name__
        'Local'
    """
    check_engine(name, address, share)
    if name == "local":
        return Local(aboard, folder)
    from mooring.lab.engines.ray import Ray

    return Ray(aboard, folder, address, share)
