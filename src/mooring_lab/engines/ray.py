"""The Ray engine: several fleets at a time, on this machine or on a cluster; only this process writes the store."""

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
from mooring_lab.engines.checkpoint_index import CheckpointIndex
from mooring_lab.engines.device_memory import free_memory
from mooring_lab.engines.runner import KeepResults, RunContext, steps_per_run
from mooring_lab.engines.signals import stop_on_signal
from mooring_lab.engines.sizing import fleet_sizes
from mooring_lab.engines.worker import Job, Message, module_search_path, run_job
from mooring_lab.engines.worker_pool import WorkerPool
from mooring_lab.methods.registry import own_methods
from mooring_lab.model.atomic_files import check_writable
from mooring_lab.model.spec import RunSpec

RESOURCES = {"cpu": ("num_cpus",), "cuda": ("num_cpus", "num_gpus")}
"""The resources of which a fleet takes one, or a share of one, by kind of device."""

CONNECT_SECONDS = 10
"""How long to wait for a cluster's head to accept a connection."""


def import_ray() -> Any:
    """Return the library; refuse in one line if it is not installed."""
    try:
        import ray
    except ModuleNotFoundError as error:
        raise MooringError('--engine ray needs Ray: pip install "mooring-lab[ray]", or leave --engine out') from error
    except ImportError as error:  # Ray is installed, but one of its own imports fails
        raise MooringError(f"Ray cannot be imported: {' '.join(str(error).split())}") from error
    return ray


def connect_ray(address: str | None = None) -> Any:
    """Return the library, connected to a cluster.

    Args:
        address: `host:port`, or `auto` on a machine of the cluster; None takes RAY_ADDRESS, or starts a cluster on this
            machine.
    """
    ray = import_ray()
    if ray.is_initialized():
        return ray
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    if address.startswith("ray://"):
        raise MooringError(f"{address} is a client's address: run this on a machine of the cluster with --address auto")
    options: dict[str, Any] = {}
    _check_reachable(address)
    if address == "local":
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        options = {"include_dashboard": False}
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **options)
    except Exception as error:  # Ray raises many types: connections, values, permissions
        message = " ".join(str(error).split())
        raise MooringError(f"no Ray cluster at {address}: {message[:200]}; `ray start --head` makes one") from error
    return ray


def _connect(address: str) -> None:
    host, _, number = address.rpartition(":")
    socket.create_connection((host, int(number)), timeout=CONNECT_SECONDS).close()


def _answers(address: str) -> bool:
    """Return whether something listens there, even if it is slow."""
    try:
        _connect(address)
    except OSError as error:
        return isinstance(error, TimeoutError)
    return True


def _check_reachable(address: str) -> None:
    """Refuse an address where nothing listens; Ray would try for minutes."""
    if ":" not in address:
        return
    if not address.rpartition(":")[2].isdecimal():
        raise MooringError(f"--address {address} is not allowed: give HOST:PORT, or auto on a machine of the cluster")
    try:
        _connect(address)
    except (OSError, ValueError, OverflowError) as error:
        message = getattr(error, "strerror", None) or str(error)
        where = "`ray start --head` makes one and says where"
        raise MooringError(f"no Ray cluster at {address}: {message}; {where}") from error


@dataclass
class RayEngine:
    """An engine that trains fleets as Ray tasks, several at a time, each with a CPU core or a GPU of its own.

    Workers stream progress and results to this process, which stores the results. The runs of a lost worker or machine
    continue elsewhere from their last checkpoint, in a folder that all machines share. Runs whose worker was out of
    memory continue in halves.

    Args:
        context: what every fleet of the study shares.
        folder: the folder of checkpoints; it must have the same path on every machine.
        address: the address of a cluster; None starts one on this machine.
        share: the part of a core or of a GPU that a fleet takes; below 1, several fleets share one.

    Example:
        >>> RayEngine(RunContext({}, {}, "cuda"), Path("study.sqlite.fleets"), share=0.25).resources()
        {'num_cpus': 0.25, 'num_gpus': 0.25}
    """

    context: RunContext
    folder: Path
    address: str | None = None
    share: float = 1.0
    _stored: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Make the folder absolute: workers have other working directories."""
        self.folder = self.folder.absolute()

    def fleet_sizes(self, specs: Sequence[RunSpec]) -> Callable[[list[RunSpec]], int]:
        """Return the sizes that fit the machines, of whose free memory one of them says how much it has; see `Engine`.

        No fleet gets more work than its share of the whole, so that no machine is idle. The size of a deterministic
        fleet does not depend on the cluster.
        """
        streams, device = self.context.streams, self.context.device
        if self.context.deterministic:
            return fleet_sizes(streams, device)
        ray = connect_ray(self.address)
        max_steps = -(-sum(steps_per_run(spec, streams[spec.data]) for spec in specs) // self._slots(ray))
        measure = ray.remote(max_retries=3, **self.resources())(free_memory)
        fits = fleet_sizes(streams, device, lambda: int(self.share * ray.get(measure.remote(device))))

        def size(runs: list[RunSpec]) -> int:
            return min(fits(runs), max(1, -(-max_steps // steps_per_run(runs[0], streams[runs[0].data]))))

        return size

    def run(self, fleets: Sequence[Sequence[RunSpec]], keep: KeepResults, *, reject: bool = False) -> None:
        """Train every fleet, as many at a time as the cluster has room for; see `Engine`."""
        ray = connect_ray(self.address)
        self._slots(ray)
        context = self.context
        index = CheckpointIndex(self.folder, context.device, reject, context.deterministic)
        task = ray.remote(num_returns="streaming", max_retries=0, **self.resources())(_run_remote_job)
        with _beacon(self.folder) as beacon, stop_on_signal() as stop:
            # After the beacon: Ray complains about an actor that is still starting when a folder is refused.
            stopper = _create_stopper(ray)

            def start_job(specs: Sequence[RunSpec]) -> Any:
                seconds, path, fixed = context.checkpoint_seconds, module_search_path(), context.deterministic
                runs, methods = tuple(specs), own_methods(spec.method for spec in specs)
                job = Job(runs, context.device, seconds, reject, self.folder, beacon, path, fixed, methods)
                return task.remote(job, self._store(ray, specs[0].data), self._store(ray, "weights"), stopper)

            def stop_all() -> None:
                stopper.stop.remote()  # without waiting: the cluster may be gone

            head = ray.get_runtime_context().gcs_address
            steps = [steps_per_run(fleet[0], context.streams[fleet[0].data]) for fleet in fleets]
            pool = WorkerPool(ray, start_job, stop_all, keep, index, context.reporter, stop, lambda: _answers(head))
            pool.run(fleets, steps)

    def resources(self) -> dict[str, float]:
        """Return what a fleet asks of Ray: a core, or a core and a GPU, or its share of them."""
        if self.context.device not in RESOURCES:
            raise MooringError(f"--engine ray chooses the GPU itself: give --device cuda, not {self.context.device}")
        return dict.fromkeys(RESOURCES[self.context.device], self.share)

    def _slots(self, ray: Any) -> int:
        """Return how many fleets can be trained at a time."""
        kind = "GPU" if "num_gpus" in self.resources() else "CPU"
        slots = int(ray.cluster_resources().get(kind, 0)) * int(1 / self.share)
        if not slots:
            raise MooringError(f"the Ray cluster has no {kind}: add a machine that has one, or give another --device")
        return slots

    def _store(self, ray: Any, name: str) -> Any:
        """Return a reference to a stream, or to all weights, in the cluster's memory; put it there once."""
        if name not in self._stored:
            context = self.context
            self._stored[name] = ray.put(dict(context.weights) if name == "weights" else context.streams[name])
        return self._stored[name]


def _run_remote_job(job: Job, stream: Any, weights: Any, stopper: Any) -> Iterator[Message]:
    """Run a job on a Ray worker until it is done or the driver's machine says to stop."""
    yield from run_job(job, stream, weights, lambda: stopper.stopped.remote().future())


def _create_stopper(ray: Any) -> Any:
    """Create the actor on the driver's machine that tells workers to stop.

    The class is defined here so that Ray sends it by value: its process imports nothing of ours, and stays small.
    """

    class Stopper:
        def __init__(self) -> None:
            import asyncio

            self.event = asyncio.Event()

        async def stopped(self) -> None:
            await self.event.wait()

        async def stop(self) -> None:
            self.event.set()

    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(num_cpus=0, max_concurrency=100_000, scheduling_strategy=here)(Stopper).remote()


@contextmanager
def _beacon(folder: Path) -> Iterator[str]:
    """Create a file in the folder for as long as this lasts: a worker that sees it has the same folder."""
    check_writable(folder)
    path = folder / f".driver-{uuid.uuid4().hex}"
    path.touch()
    try:
        yield path.name
    finally:
        with suppress(OSError):
            path.unlink()
