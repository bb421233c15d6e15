"""What sails a fleet in another process, here or elsewhere: a generator that tells what the driver should know."""

import os
import platform
import queue
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mooring
from mooring.errors import MooringError
from mooring.lab.engines.checkpoint_index import Unfinished
from mooring.lab.engines.device_memory import free
from mooring.lab.engines.reporting import Seen, Silent
from mooring.lab.engines.runner import Aboard, Voyage
from mooring.lab.engines.signals import InterruptedStudyError, Stop
from mooring.lab.engines.sizing import Sizes
from mooring.lab.model.determinism import configure_cublas
from mooring.lab.model.results import Result
from mooring.lab.model.spec import RunSpec
from mooring.lab.networks.initialization import BackboneWeights
from mooring.lab.streams.stream import Stream

__all__ = ["Begun", "Failed", "Kept", "Noted", "Order", "Sailing", "Stopped", "places", "sail", "sized"]


@dataclass(frozen=True)
class Order:
    """What a crew is told.

    Attributes:
        specs: the runs.
        device: where to compute.
        every: seconds between checkpoints within a task.
        reject: take out runs whose penalty does not interpolate after the first task.
        folder: where checkpoints go, which every machine has in the same place.
        beacon: a file in it; where it is not seen, the folder is another.
        path: where modules are found beside the usual places.
        deterministic: whether the same bits are to come each time.
        version: of the library that gave the order.
    """

    specs: tuple[RunSpec, ...]
    device: str
    every: float
    reject: bool
    folder: Path
    beacon: str
    path: tuple[str, ...] = ()
    deterministic: bool = False
    version: str = mooring.__version__


@dataclass(frozen=True)
class Begun:
    """A crew is at work."""


@dataclass(frozen=True)
class Sailing:
    """The fleet has come further: so many run-steps are behind it."""

    seen: Seen
    done: int


@dataclass(frozen=True)
class Noted:
    """Something a user should know."""

    line: str


@dataclass(frozen=True)
class Kept:
    """Results to put away; then the checkpoint of that name can go."""

    results: list[Result]
    checkpoint: str


@dataclass(frozen=True)
class Failed:
    """A user's error, in one line."""

    line: str


@dataclass(frozen=True)
class Stopped:
    """It was asked to stop, and is saved."""


Heard = Begun | Sailing | Noted | Kept | Failed | Stopped


class _Telling(Silent):
    """A reporter whose words travel."""

    def __init__(self, told: "queue.SimpleQueue[Heard | BaseException | None]") -> None:
        self.told = told

    def sailing(self, number: int, fleet: Seen, done: int) -> None:
        self.told.put(Sailing(fleet, done))

    def note(self, line: str) -> None:
        self.told.put(Noted(line))


def sail(order: Order, stream: Stream, weights: dict[str, BackboneWeights], stopped: Any = None) -> Iterator[Heard]:
    """Sail the runs of an order to their end, from their last checkpoint on.

    Args:
        order: what to sail.
        stream: through what.
        weights: what backbones start from, by fingerprint.
        stopped: makes a future that is done when everything is to stop.

    Example:
        >>> import tempfile
        >>> from mooring.lab.streams import by_class, digits
        >>> stream = by_class(digits(), per_task=5)
        >>> spec = RunSpec("digits", stream.fingerprint, "plain", 0, epochs=1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     order = Order((spec,), "cpu", 60.0, False, Path(folder), beacon="")
        ...     heard = list(sail(order, stream, {}))
        >>> heard[0], heard[-1].results[0].status
        (Begun(), 'finished')
    """
    yield Begun()
    _look_in(order.path)
    if order.version != mooring.__version__:
        where = f"mooring {mooring.__version__} on {platform.node()}, {order.version} where the study is driven"
        yield Failed(f"the machines differ ({where}): install the same version on all of them")
        return
    if not (order.folder / order.beacon).exists():
        yield Noted(f"{order.folder} is not shared with {platform.node()}: what is interrupted there starts again")
    told: queue.SimpleQueue[Heard | BaseException | None] = queue.SimpleQueue()
    stop = Stop()
    if stopped is not None:
        stopped().add_done_callback(lambda future: None if future.exception() else stop.ask())
    rest = order.device, order.every, _Telling(told), order.deterministic
    aboard = Aboard({stream.fingerprint: stream}, weights, *rest)
    threading.Thread(target=_work, args=(order, aboard, stop, told), daemon=True).start()
    while (heard := told.get()) is not None:
        if isinstance(heard, BaseException):
            raise heard
        yield heard


def _work(order: Order, aboard: Aboard, stop: Stop, told: "queue.SimpleQueue[Heard | BaseException | None]") -> None:
    """Beside the generator, which tells what this puts into the queue, and ends with None."""
    unfinished = Unfinished(order.folder, order.device, order.reject, order.deterministic)
    try:
        if order.deterministic:
            configure_cublas(order.device)
        voyage = Voyage(aboard, 0, order.specs, unfinished, stop)
        voyage.results(lambda results, path: told.put(Kept(results, path.name)))
    except InterruptedStudyError:
        told.put(Stopped())
    except MooringError as error:
        told.put(Failed(str(error)))
    except BaseException as error:
        told.put(error)
    told.put(None)


def places() -> tuple[str, ...]:
    """Where networks of one's own are found here; crews look there too."""
    return tuple(os.path.abspath(each) for each in sys.path)


def _look_in(path: Sequence[str]) -> None:
    sys.path += [each for each in path if each not in sys.path]


def sized(
    specs: Sequence[RunSpec],
    stream: Stream,
    weights: dict[str, BackboneWeights],
    device: str,
    path: Sequence[str] = (),
    share: float = 1.0,
) -> tuple[int, list[str]]:
    """How many of these runs, which are of one shape, sail together on this machine, and what there is to note.

    Args:
        specs: the runs.
        stream: what they go through.
        weights: what backbones start from, by fingerprint.
        device: where to compute.
        path: where modules are found beside the usual places.
        share: what part of the device's memory is theirs.

    Example:
        >>> from mooring.lab.streams import by_class, digits
        >>> stream = by_class(digits(), per_task=5)
        >>> sized([RunSpec("digits", stream.fingerprint, "plain", seed) for seed in range(3)], stream, {}, "cpu")
        (3, [])
    """
    _look_in(path)
    notes: list[str] = []
    known = Sizes({stream.fingerprint: stream}, weights, device, notes.append, free=lambda on: int(share * free(on)))
    return known(specs), notes
