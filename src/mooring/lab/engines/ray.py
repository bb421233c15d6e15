"""The Ray engine: fleets side by side, on this machine or on a cluster; this process alone writes the store."""

import logging
import os
import socket
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mooring.errors import MooringError
from mooring.lab.engines import worker as crew
from mooring.lab.engines.checkpoint_index import Unfinished
from mooring.lab.engines.dispatch import Dispatch
from mooring.lab.engines.runner import Aboard, steps_of
from mooring.lab.engines.signals import stoppable
from mooring.lab.engines.sizing import Sizes
from mooring.lab.model.atomic_files import check_writable
from mooring.lab.model.results import Result
from mooring.lab.model.spec import RunSpec

__all__ = ["Ray", "connected", "installed"]

RESOURCES = {"cpu": ("num_cpus",), "cuda": ("num_cpus", "num_gpus")}
"""What a fleet takes one of, or a share of one, by kind of device."""


def installed() -> Any:
    """The library; refused in one line where it is missing."""
    try:
        import ray
    except ModuleNotFoundError as error:
        raise MooringError('--engine ray needs Ray: pip install "mooring[ray]", or leave --engine out') from error
    except ImportError as error:  # it is there, but something in it is not
        raise MooringError(f"Ray cannot be imported: {' '.join(str(error).split())}") from error
    return ray


def connected(address: str | None = None) -> Any:
    """The library, connected to the cluster at an address, or to one of its own on this machine.

    Args:
        address: `host:port` or `auto`, told on a machine of that cluster; None takes RAY_ADDRESS, or this machine.
    """
    ray = installed()
    if ray.is_initialized():
        return ray
    where = address or os.environ.get("RAY_ADDRESS") or "local"
    if where.startswith("ray://"):
        raise MooringError(f"{where} is a client's address: run this on a machine of the cluster with --address auto")
    rest: dict[str, Any] = {}
    _reachable(where)
    if where == "local":
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        rest = {"include_dashboard": False}
    try:
        ray.init(where, log_to_driver=False, logging_level=logging.ERROR, **rest)
    except Exception as error:  # of many kinds: connections, values, permissions
        told = " ".join(str(error).split())
        raise MooringError(f"no Ray cluster at {where}: {told[:200]}; `ray start --head` makes one") from error
    return ray


def _connect(where: str) -> None:
    host, _, port = where.rpartition(":")
    socket.create_connection((host, int(port)), timeout=10).close()


def _answers(where: str) -> bool:
    """Whether somebody listens there, or is only slow to."""
    try:
        _connect(where)
    except TimeoutError:
        return True
    except OSError:
        return False
    return True


def _reachable(where: str) -> None:
    """Refuse an address where nobody listens: Ray would try for minutes."""
    if ":" not in where:
        return
    if not where.rpartition(":")[2].isdecimal():
        raise MooringError(f"--address {where} is not allowed: give HOST:PORT, or auto on a machine of the cluster")
    try:
        _connect(where)
    except (OSError, ValueError, OverflowError) as error:
        told = getattr(error, "strerror", None) or str(error)
        raise MooringError(f"no Ray cluster at {where}: {told}; `ray start --head` makes one and says where") from error


@dataclass
class Ray:
    """Runs fleets as Ray tasks, several at a time, each with a CPU core or a GPU of its own.

    Progress and results stream back, and this process keeps the results. Where a worker or a machine is lost, its runs
    go on elsewhere from their last checkpoint, which lies in a folder that all machines share. Runs whose worker was
    out of memory go on in halves.

    Args:
        aboard: what every fleet takes along.
        folder: where checkpoints go; every machine must have it in the same place.
        address: of a cluster; None for one on this machine.
        share: what part of a core or of a GPU a fleet takes; where it is not the whole, several share one.

    Example:
        >>> Ray(Aboard({}, {}, "cuda"), Path("study.sqlite.fleets"), share=0.25).takes()
        {'num_cpus': 0.25, 'num_gpus': 0.25}
    """

    aboard: Aboard
    folder: Path
    address: str | None = None
    share: float = 1.0
    _put: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Absolute, because workers are in folders of their own."""
        self.folder = self.folder.absolute()

    def sizes(self, specs: Sequence[RunSpec]) -> Callable[[list[RunSpec]], int]:
        """How many of the runs of a shape sail together, of all these.

        As fits the machines and is fastest there, found out by one of them; and no fleet has more work than its share,
        so that no machine is idle. A deterministic fleet has the same size whatever there is.
        """
        if self.aboard.deterministic:
            return Sizes(self.aboard.streams, self.aboard.weights, self.aboard.device, fixed=True)
        ray = connected(self.address)
        streams = self.aboard.streams
        share = -(-sum(steps_of(spec, streams[spec.data]) for spec in specs) // self._slots(ray))
        measure = ray.remote(max_retries=3, **self.takes())(crew.sized)

        def size(runs: list[RunSpec]) -> int:
            stream = self._stored(ray, runs[0].data)
            most: int
            most, notes = ray.get(
                measure.remote(
                    runs, stream, self._stored(ray, "weights"), self.aboard.device, crew.places(), self.share
                )
            )
            for line in notes:
                self.aboard.reporter.note(line)
            return min(most, max(1, -(-share // steps_of(runs[0], streams[runs[0].data]))))

        return size

    def run(
        self, fleets: Sequence[Sequence[RunSpec]], keep: Callable[[list[Result]], None], *, reject: bool = False
    ) -> None:
        """Run every fleet, as many at once as there is room for; see `Engine`."""
        ray = connected(self.address)
        self._slots(ray)
        aboard = self.aboard
        unfinished = Unfinished(self.folder, aboard.device, reject, aboard.deterministic)
        task = ray.remote(num_returns="streaming", max_retries=0, **self.takes())(_crewed)
        with _beacon(self.folder) as beacon, stoppable() as stop:
            master = _master(ray)  # not before: it is still being made when a folder is refused, and Ray says so

            def launch(specs: Sequence[RunSpec]) -> Any:
                told = aboard.device, aboard.every, reject, self.folder, beacon, crew.places(), aboard.deterministic
                order = crew.Order(tuple(specs), *told)
                return task.remote(order, self._stored(ray, specs[0].data), self._stored(ray, "weights"), master)

            def halt() -> None:
                master.stop.remote()  # not waited for: its cluster may be gone

            where = ray.get_runtime_context().gcs_address
            steps = [steps_of(fleet[0], aboard.streams[fleet[0].data]) for fleet in fleets]
            told = keep, unfinished, aboard.reporter, stop, lambda: _answers(where)
            hint = ", or look at the logs in /tmp/ray/session_latest/logs"
            Dispatch(ray, launch, halt, *told, hint).run(fleets, steps)

    def takes(self) -> dict[str, float]:
        """What a fleet asks of Ray: a core, or a core and a GPU, or its share of them."""
        if self.aboard.device not in RESOURCES:
            raise MooringError(f"--engine ray chooses the GPU itself: give --device cuda, not {self.aboard.device}")
        return dict.fromkeys(RESOURCES[self.aboard.device], self.share)

    def _slots(self, ray: Any) -> int:
        """How many fleets sail at once."""
        kind = "GPU" if "num_gpus" in self.takes() else "CPU"
        found = int(ray.cluster_resources().get(kind, 0)) * int(1 / self.share)
        if not found:
            raise MooringError(f"the Ray cluster has no {kind}: add a machine that has one, or give another --device")
        return found

    def _stored(self, ray: Any, what: str) -> Any:
        """A stream, or all weights, in the cluster's own memory; put there once."""
        if what not in self._put:
            self._put[what] = ray.put(dict(self.aboard.weights) if what == "weights" else self.aboard.streams[what])
        return self._put[what]


def _crewed(order: crew.Order, stream: Any, weights: Any, master: Any) -> Iterator[crew.Heard]:
    """A crew on a Ray worker, which hears from the driver's machine when to stop."""
    yield from crew.sail(order, stream, weights, lambda: master.stopped.remote().future())


def _master(ray: Any) -> Any:
    """Who says on the driver's machine that everything is to stop.

    The class is made here so that it travels by value: its process imports nothing of ours, and is light.
    """

    class Master:
        def __init__(self) -> None:
            import asyncio

            self.event = asyncio.Event()

        async def stopped(self) -> None:
            await self.event.wait()

        async def stop(self) -> None:
            self.event.set()

    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(num_cpus=0, max_concurrency=100_000, scheduling_strategy=here)(Master).remote()


@contextmanager
def _beacon(folder: Path) -> Iterator[str]:
    """A file in the folder while this lasts: a worker that sees it has the same folder."""
    check_writable(folder)
    path = folder / f".driver-{uuid.uuid4().hex}"
    path.touch()
    try:
        yield path.name
    finally:
        with suppress(OSError):
            path.unlink()
