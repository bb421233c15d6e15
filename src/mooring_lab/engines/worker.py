"""A worker: trains one fleet in another process, and sends messages to the process that drives the study."""

import os
import platform
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mooring
from mooring.errors import MooringError
from mooring_lab.engines.checkpoint_index import CheckpointIndex
from mooring_lab.engines.runner import FleetProgress, FleetRunner, Reporter, RunContext
from mooring_lab.engines.signals import InterruptedStudyError, StopRequest
from mooring_lab.methods.registry import register
from mooring_lab.model.method import Method
from mooring_lab.model.precision import configure_cublas
from mooring_lab.model.results import Result
from mooring_lab.model.spec import RunSpec
from mooring_lab.networks.initialization import BackboneWeights
from mooring_lab.streams.stream import Stream


@dataclass(frozen=True)
class Job:
    """What a worker is asked to train.

    Attributes:
        specs: the runs, all of one fleet.
        device: the device to train on.
        checkpoint_seconds: seconds between checkpoints within a task.
        reject: stop runs whose penalty does not interpolate after the first task.
        folder: the folder of checkpoints, which must have the same path on every machine.
        beacon: the name of a file in the folder; a worker that does not see it has another folder.
        path: the driver's `sys.path`, where networks of the user are found.
        deterministic: whether to give the same bits each time.
        methods: the methods of the runs that are not of this package.
        version: the version of the library that made the job.
    """

    specs: tuple[RunSpec, ...]
    device: str
    checkpoint_seconds: float
    reject: bool
    folder: Path
    beacon: str
    path: tuple[str, ...] = ()
    deterministic: bool = False
    methods: tuple[Method, ...] = ()
    version: str = mooring.__version__


@dataclass(frozen=True)
class Started:
    """The worker has started."""


@dataclass(frozen=True)
class Advanced:
    """The fleet has taken more steps: `done` run-steps in all."""

    progress: FleetProgress
    done: int


@dataclass(frozen=True)
class Noted:
    """A line that the user should read."""

    line: str


@dataclass(frozen=True)
class Finished:
    """Results to store; then the checkpoint of that name can be deleted."""

    results: list[Result]
    checkpoint: str


@dataclass(frozen=True)
class Failed:
    """An error for the user, in one line."""

    line: str


@dataclass(frozen=True)
class Stopped:
    """The worker stopped because it was asked to, and its fleet is saved."""


Message = Started | Advanced | Noted | Finished | Failed | Stopped
_Queue = queue.SimpleQueue[Message | BaseException | None]


class _QueueReporter(Reporter):
    """A reporter that puts messages into a queue."""

    def __init__(self, messages: _Queue) -> None:
        self.messages = messages

    def advanced(self, number: int, fleet: FleetProgress, done: int) -> None:
        self.messages.put(Advanced(fleet, done))

    def note(self, line: str) -> None:
        self.messages.put(Noted(line))


def run_job(
    job: Job, stream: Stream, weights: dict[str, BackboneWeights], stopped: Callable[[], Any] | None = None
) -> Iterator[Message]:
    """Train the runs of a job to the end, from their last checkpoint, and yield messages about it.

    Args:
        job: the runs and how to train them.
        stream: their stream.
        weights: the initial weights of backbones by fingerprint.
        stopped: returns a future that is done when the worker has to stop.

    Example:
        >>> import tempfile
        >>> from mooring_lab.streams import by_class, digits
        >>> stream = by_class(digits(), per_task=5)
        >>> spec = RunSpec("digits", stream.fingerprint, "plain", 0, epochs=1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     job = Job((spec,), "cpu", 60.0, False, Path(folder), beacon="")
        ...     messages = list(run_job(job, stream, {}))
        >>> messages[0], messages[-1].results[0].status
        (Started(), 'finished')
    """
    yield Started()
    sys.path += [folder for folder in job.path if folder not in sys.path]
    register(job.methods)
    if job.version != mooring.__version__:
        versions = f"mooring {mooring.__version__} on {platform.node()}, {job.version} where the study is driven"
        yield Failed(f"the machines differ ({versions}): install the same version on all of them")
        return
    if not (job.folder / job.beacon).exists():
        yield Noted(f"{job.folder} is not shared with {platform.node()}: what is interrupted there starts again")
    messages: _Queue = queue.SimpleQueue()
    stop = StopRequest()
    if stopped is not None:
        stopped().add_done_callback(lambda future: None if future.exception() else stop.ask())
    reporter, streams = _QueueReporter(messages), {stream.fingerprint: stream}
    context = RunContext(streams, weights, job.device, job.checkpoint_seconds, reporter, job.deterministic)
    # In a thread of its own, so that messages can be sent while the fleet trains.
    threading.Thread(target=_train, args=(job, context, stop, messages), daemon=True).start()
    while (message := messages.get()) is not None:
        if isinstance(message, BaseException):
            raise message
        yield message


def _train(job: Job, context: RunContext, stop: StopRequest, messages: _Queue) -> None:
    """Train the fleet and put messages into the queue; the last one is None."""
    index = CheckpointIndex(job.folder, job.device, job.reject, job.deterministic)
    try:
        if job.deterministic:
            configure_cublas(job.device)
        runner = FleetRunner(context, 0, job.specs, index, stop)
        runner.run(lambda results, path: messages.put(Finished(results, path.name)))
    except InterruptedStudyError:
        messages.put(Stopped())
    except MooringError as error:
        messages.put(Failed(str(error)))
    except BaseException as error:
        messages.put(error)
    messages.put(None)


def module_search_path() -> tuple[str, ...]:
    """Return this process's `sys.path` with absolute folders, for workers to find the user's networks."""
    return tuple(os.path.abspath(folder) for folder in sys.path)
