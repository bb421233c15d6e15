"""Fleets side by side on this machine, each in a process of its own: one trains while another one sets out."""

import signal
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from multiprocessing import connection, get_context
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import torch

from mooring.backends.gc_control import settled
from mooring.lab.engines import worker as crew
from mooring.lab.engines.checkpoint_index import Unfinished
from mooring.lab.engines.device_memory import free
from mooring.lab.engines.dispatch import Dispatch
from mooring.lab.engines.packing import Packed, packed, unpacked
from mooring.lab.engines.runner import Aboard, steps_of
from mooring.lab.engines.signals import stoppable
from mooring.lab.engines.sizing import Sizes
from mooring.lab.model.atomic_files import check_writable
from mooring.lab.model.results import Result
from mooring.lab.model.spec import RunSpec
from mooring.lab.networks.start import BackboneWeights
from mooring.lab.streams.stream import Stream

__all__ = ["Beside", "Crews"]

GUARD = '; in a script, run the study under `if __name__ == "__main__":`, which every worker reads again'

LEAVE_SECONDS = 10.0
"""So long a worker has to go when it is told to."""


@dataclass
class Beside:
    """Runs several fleets at a time, in processes of this machine; this one alone writes the store.

    A worker that is lost is replaced, and its runs go on from their last checkpoint.

    Args:
        aboard: what every fleet takes along.
        folder: where checkpoints go.
        share: what part of this machine, or of its GPU's memory, a fleet takes.
        crews: workers that stay for other runs; None starts some and has them go.

    Example:
        >>> Beside(Aboard({}, {}), Path("study.sqlite.fleets"), share=0.5).workers
        2
    """

    aboard: Aboard
    folder: Path
    share: float
    crews: "Crews | None" = None

    @property
    def workers(self) -> int:
        """How many fleets sail at once."""
        return max(1, round(1 / self.share))

    def sizes(self, specs: Sequence[RunSpec]) -> Callable[[list[RunSpec]], int]:
        """How many of the runs of a shape sail together, of all these: as fits into its share, and as is fastest."""
        aboard = self.aboard
        told = aboard.streams, aboard.weights, aboard.device, aboard.reporter.note
        return Sizes(*told, free=lambda on: int(self.share * free(on)), fixed=aboard.deterministic)

    def run(
        self, fleets: Sequence[Sequence[RunSpec]], keep: Callable[[list[Result]], None], *, reject: bool = False
    ) -> None:
        """Run every fleet, several at once; see `Engine`."""
        aboard = self.aboard
        check_writable(self.folder)
        unfinished = Unfinished(self.folder, aboard.device, reject, aboard.deterministic)
        steps = [steps_of(fleet[0], aboard.streams[fleet[0].data]) for fleet in fleets]
        needed = {fleet[0].data for fleet in fleets}
        streams = {data: stream for data, stream in aboard.streams.items() if data in needed}
        folder = self.folder.absolute()
        told = aboard.device, aboard.every, reject, folder, "", crew.places(), aboard.deterministic
        threads = max(1, int(torch.get_num_threads() * self.share))
        with nullcontext(self.crews) if self.crews else Crews() as crews, stoppable() as stop:
            crews.board(min(self.workers, len(fleets)), streams, aboard.weights, threads=threads)

            def launch(specs: Sequence[RunSpec]) -> _Passage:
                return crews.launch(crew.Order(tuple(specs), *told))

            told_to = crews.halt, keep, unfinished, aboard.reporter, stop
            Dispatch(crews, launch, *told_to, hint=GUARD).run(fleets, steps)


@dataclass(frozen=True)
class _Given:
    """What all take along, and how many threads each may use."""

    packed: Packed
    threads: int


class _LostError(Exception):
    """A worker's process is gone."""


class _OtherError(Exception):
    """What cannot happen on one machine, and a cluster knows."""


class _Passage:
    """What one crew tells, as it comes."""

    def __init__(self, order: crew.Order) -> None:
        self.order = order
        self.worker: _Worker | None = None

    def __next__(self) -> crew.Heard:
        assert self.worker is not None
        try:
            heard = self.worker.pipe.recv()
        except (EOFError, OSError) as error:
            self.worker.gone()
            raise _LostError from error
        if heard is None or isinstance(heard, BaseException):
            self.worker.passage = None
        if heard is None:
            raise StopIteration
        if isinstance(heard, BaseException):
            raise heard
        told: crew.Heard = heard
        return told


class _Worker:
    """A process, the way to talk to it, and what it is at."""

    def __init__(self, context: Any) -> None:
        self.pipe, theirs = context.Pipe()
        stops, self.stop = context.Pipe(duplex=False)  # nothing is locked by one that is killed
        self.process = context.Process(target=_work, args=(theirs, stops), daemon=True)
        self.process.start()
        for end in (theirs, stops):
            end.close()
        self.passage: _Passage | None = None
        self.alive = True
        self.aboard: _Given | None = None

    def take(self, passage: _Passage, aboard: "_Given") -> None:
        """Have it sail, with what all take along, which it is given once; that it is gone is heard when it tells."""
        self.passage, passage.worker = passage, self
        with suppress(OSError):
            if self.aboard is not aboard:
                self.aboard = aboard
                self.pipe.send(aboard)
            self.pipe.send(passage.order)

    def halt(self) -> None:
        """Ask it to stop."""
        with suppress(OSError):
            self.stop.send(None)

    def gone(self) -> None:
        """It is no more."""
        self.alive, self.passage = False, None
        self.process.kill()
        self.process.join(LEAVE_SECONDS)
        for end in (self.pipe, self.stop):
            end.close()


class Crews:
    """Workers of this machine, asked as `Dispatch` asks a cluster. They start when there is something for them to do.

    Example:
        >>> with Crews() as crews:
        ...     crews.board(2, {}, {}, threads=1)
        ...     len(crews.workers)
        0
    """

    exceptions = SimpleNamespace(
        WorkerCrashedError=_LostError,
        NodeDiedError=_OtherError,
        OutOfMemoryError=_OtherError,
        ObjectLostError=_OtherError,
    )

    def __init__(self) -> None:
        self.context, self.count, self.aboard = get_context("spawn"), 1, _Given(packed({}, {}), 1)
        self.halted = False
        self.workers: list[_Worker] = []
        self.waiting: list[_Passage] = []

    def __enter__(self) -> "Crews":
        return self

    def __exit__(self, *error: object) -> None:
        """Everybody goes."""
        idle = [worker for worker in self.workers if worker.alive and worker.passage is None]
        for worker in idle:
            with suppress(OSError):
                worker.pipe.send(None)
        for worker in idle:
            worker.process.join(LEAVE_SECONDS)
        for worker in self.workers:
            if worker.alive:
                worker.gone()

    def board(
        self, count: int, streams: Mapping[str, Stream], weights: Mapping[str, BackboneWeights], *, threads: int
    ) -> None:
        """What comes next.

        Args:
            count: how many of them sail at once.
            streams: what they may go through, by fingerprint.
            weights: what backbones start from, by fingerprint.
            threads: of each.
        """
        for worker in self.workers:
            if worker.alive and (self.halted or worker.passage is not None):  # of a run that was broken off
                worker.gone()
        self.waiting, self.halted = [], False
        self.count, self.aboard = count, _Given(packed(streams, weights), threads)

    def launch(self, order: crew.Order) -> _Passage:
        """As soon as a worker is free."""
        passage = _Passage(order)
        self.waiting.append(passage)
        return passage

    def halt(self) -> None:
        """Ask all of them to stop."""
        self.halted = True
        for worker in self.workers:
            worker.halt()

    def wait(self, passages: list[_Passage], num_returns: int, timeout: float) -> tuple[list[_Passage], list[_Passage]]:
        """Those that have something to tell, and the others."""
        self._hand_out()
        under_way = {worker.pipe: worker.passage for worker in self.workers if worker.passage in passages}
        if not under_way:
            time.sleep(timeout)
        ready = [under_way[pipe] for pipe in connection.wait(list(under_way), timeout)] if under_way else []
        found = [passage for passage in passages if passage in ready]
        return found, [passage for passage in passages if passage not in ready]

    def get(self, heard: crew.Heard) -> crew.Heard:
        """What was told is here already."""
        return heard

    def cancel(self, passage: _Passage) -> None:
        """It need not begin; where it has, it ends."""
        if passage in self.waiting:
            self.waiting.remove(passage)
        elif passage.worker is not None and passage.worker.passage is passage:
            passage.worker.gone()

    def _hand_out(self) -> None:
        for worker in self.workers:
            if worker.alive and worker.passage is None and not worker.process.is_alive():
                worker.gone()  # it was lost while it had nothing to do
        self.workers = [worker for worker in self.workers if worker.alive]
        idle = [worker for worker in self.workers if worker.passage is None]
        for _ in range(min(len(self.waiting), self.count - (len(self.workers) - len(idle)))):
            worker = idle.pop() if idle else _Worker(self.context)
            self.workers += [] if worker in self.workers else [worker]
            # much work, and little: what keeps the device busy goes beside what keeps a core busy
            worker.take(self.waiting.pop(-(self.workers.index(worker) % 2)), self.aboard)


def _work(pipe: connection.Connection, stops: connection.Connection) -> None:
    """What a worker does: sail what it is told, one fleet after the other, until it is told nothing."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # they go to every process; the one that started this decides
    stopped: Future[None] = Future()

    def heed() -> None:
        with suppress(EOFError, OSError):  # nobody will ask any more
            stops.recv()
            stopped.set_result(None)

    Thread(target=heed, daemon=True).start()
    with settled(), suppress(EOFError, ConnectionError):  # nobody is there any more
        while (told := pipe.recv()) is not None:
            if isinstance(told, _Given):
                streams, weights = unpacked(told.packed)
                torch.set_num_threads(told.threads)
                continue
            try:
                for heard in crew.sail(told, streams[told.specs[0].data], weights, lambda: stopped):
                    pipe.send(heard)
                pipe.send(None)
            except ConnectionError:
                raise
            except BaseException:
                pipe.send(RuntimeError(f"in a worker: {traceback.format_exc()}"))
