"""The local engine: one fleet after the other on this machine, saved as they go."""

import hashlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Protocol

from mooring.errors import MooringError
from mooring.lab.fleet import checkpoint
from mooring.lab.fleet.fleet import Fleet
from mooring.lab.networks.start import Weights
from mooring.lab.order import batch_sizes
from mooring.lab.results import Result
from mooring.lab.spec import RunSpec
from mooring.lab.streams.stream import Stream

__all__ = ["InterruptedStudyError", "Local", "Reporter", "Silent", "steps_of"]

CHECKPOINT_SECONDS = 120.0
LOOK_SECONDS = 0.1


class InterruptedStudyError(MooringError):
    """Stopped by Ctrl-C or a signal; everything up to here is saved."""


class Reporter(Protocol):
    """Who is told how a study gets on."""

    def begin(self, fleets: Sequence[Sequence[RunSpec]], work: Sequence[int], done: int) -> None:
        """The fleets to run, how many run-steps each is, and how many runs were done before."""

    def sailing(self, number: int, fleet: Fleet) -> None:
        """A fleet has come further; at a bounded rate."""

    def finished(self, number: int, results: Sequence[Result]) -> None:
        """A fleet's results are kept."""

    def note(self, line: str) -> None:
        """Something a user should know."""

    def close(self) -> None:
        """It is over, one way or another."""


class Silent:
    """Tells nobody."""

    def begin(self, fleets: Sequence[Sequence[RunSpec]], work: Sequence[int], done: int) -> None:
        """Nothing."""

    def sailing(self, number: int, fleet: Fleet) -> None:
        """Nothing."""

    def finished(self, number: int, results: Sequence[Result]) -> None:
        """Nothing."""

    def note(self, line: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def steps_of(spec: RunSpec, stream: Stream) -> int:
    """How many iterations a run takes."""
    return sum(len(batch_sizes(len(task.train), spec.batch)) for task in stream.tasks) * spec.epochs


@dataclass
class Local:
    """Runs fleets one after the other.

    Args:
        streams: by fingerprint.
        weights: what backbones start from, by fingerprint.
        folder: where checkpoints go.
        device: where to compute.
        every: seconds between checkpoints within a task.
        reporter: who is told.
    """

    streams: Mapping[str, Stream]
    weights: Mapping[str, Weights]
    folder: Path
    device: str = "cpu"
    every: float = CHECKPOINT_SECONDS
    reporter: Reporter = field(default_factory=Silent)

    def run(
        self, fleets: Sequence[Sequence[RunSpec]], keep: Callable[[list[Result]], None], *, reject: bool = False
    ) -> None:
        """Run every fleet to its end, from its checkpoint where it has one.

        Args:
            fleets: the runs.
            keep: called with the results of each fleet, to put them away; its checkpoint is deleted after that.
            reject: take out runs whose penalty does not interpolate after the first task.
        """
        with _stoppable() as asked:
            for number, specs in enumerate(fleets):
                path = self.checkpoint(specs, reject)
                fleet = Fleet(
                    specs, self.streams[specs[0].data], device=self.device, weights=self.weights, reject=reject
                )
                if fleet.stack.way == "in turn":
                    self.reporter.note(f"{specs[0].network} cannot be stacked: its runs train one after the other")
                if path.exists():
                    fleet = self._restored(fleet, specs, path, reject)
                watch = _Watch(path, self.every, asked, lambda f, n=number: self.reporter.sailing(n, f))  # type: ignore[misc]
                results = fleet.sail(watch)
                keep(results)
                path.unlink(missing_ok=True)
                self.reporter.finished(number, results)

    def checkpoint(self, specs: Sequence[RunSpec], reject: bool) -> Path:
        """The checkpoint of these runs together."""
        name = repr((sorted(spec.key for spec in specs), reject, self.device))
        return self.folder / f"{hashlib.blake2b(name.encode(), digest_size=16).hexdigest()}.safetensors"

    def _restored(self, fleet: Fleet, specs: Sequence[RunSpec], path: Path, reject: bool) -> Fleet:
        try:
            checkpoint.restore(fleet, path)
        except MooringError as error:
            self.reporter.note(f"{error}; its runs start again")
            path.unlink(missing_ok=True)
            return Fleet(specs, self.streams[specs[0].data], device=self.device, weights=self.weights, reject=reject)
        return fleet


class _Watch:
    """Saves a fleet after each task and every few minutes, and stops it between two steps when asked to."""

    def __init__(self, path: Path, every: float, asked: threading.Event, tell: Callable[[Fleet], None]) -> None:
        self.path, self.every, self.asked, self.tell = path, every, asked, tell
        self.saved = self.told = time.monotonic()

    def look(self, fleet: Fleet) -> None:
        now = time.monotonic()
        if now - self.told >= LOOK_SECONDS:
            self.told = now
            self.tell(fleet)
        if self.asked.is_set():
            self.save(fleet)
            raise InterruptedStudyError(
                "interrupted; everything so far is saved, and the same command continues from here"
            )
        if now - self.saved >= self.every:
            self.save(fleet)

    def harbour(self, fleet: Fleet) -> None:
        self.save(fleet)
        self.tell(fleet)

    def save(self, fleet: Fleet) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise MooringError(f"cannot write in {self.path.parent} ({error.strerror}): it is in the way") from error
        checkpoint.save(fleet, self.path)
        self.saved = time.monotonic()


@contextmanager
def _stoppable() -> Iterator[threading.Event]:
    """While this lasts, a first Ctrl-C or SIGTERM asks politely, and a second one does what it always does."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def ask(number: int, frame: FrameType | None) -> None:
        asked.set()
        for each, handler in before.items():
            signal.signal(each, handler)

    for number in before:
        signal.signal(number, ask)
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
