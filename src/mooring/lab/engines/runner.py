"""A voyage: one fleet from where it was last saved to its results, in parts where it does not fit into memory."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mooring.errors import MooringError
from mooring.lab.engines.checkpoint_index import Unfinished
from mooring.lab.engines.device_memory import ran_out, release
from mooring.lab.engines.reporting import Reporter, Seen, Silent
from mooring.lab.engines.signals import Stop
from mooring.lab.fleet import checkpoint
from mooring.lab.fleet.fleet import Fleet
from mooring.lab.fleet.grouping import fleet_shape, split_evenly
from mooring.lab.model.determinism import deterministic
from mooring.lab.model.order import batch_sizes
from mooring.lab.model.results import Result
from mooring.lab.model.spec import RunSpec
from mooring.lab.networks.initialization import BackboneWeights
from mooring.lab.streams.stream import Stream

__all__ = ["CHECKPOINT_SECONDS", "Aboard", "Voyage", "steps_of"]

CHECKPOINT_SECONDS = 120.0
LOOK_SECONDS = 0.1

PART = 0.02
"""The part of the time that saving after tasks may take; a large fleet with short tasks is not saved after each."""

QUICK = 0.1
"""Seconds that saving may take in any case."""

SPEED = 1e9
"""Bytes that are saved in a second, until it is known."""


def steps_of(spec: RunSpec, stream: Stream) -> int:
    """How many iterations a run takes.

    Example:
        >>> from mooring.lab.streams import by_class, digits
        >>> stream = by_class(digits(), per_task=5)
        >>> steps_of(RunSpec("digits", stream.fingerprint, "plain", 0, epochs=2, batch=500), stream)
        8
    """
    return sum(len(batch_sizes(len(task.train), spec.batch)) for task in stream.tasks) * spec.epochs


@dataclass
class Aboard:
    """What every voyage of a study takes along.

    Attributes:
        streams: by fingerprint.
        weights: what backbones start from, by fingerprint.
        device: where to compute.
        every: seconds between checkpoints within a task.
        reporter: who is told.
        deterministic: every run gives the same bits each time: fleets stay whole.
        most: how many runs of a shape fit into memory, where that was found out.
    """

    streams: Mapping[str, Stream]
    weights: Mapping[str, BackboneWeights]
    device: str = "cpu"
    every: float = CHECKPOINT_SECONDS
    reporter: Reporter = field(default_factory=Silent)
    deterministic: bool = False
    most: dict[tuple[object, ...], int] = field(default_factory=dict)


@dataclass
class _Part:
    """Runs that sail together, and how many steps they have behind them on disk."""

    specs: Sequence[RunSpec]
    steps: int = 0


@dataclass
class Voyage:
    """One fleet on its way: whole, or in parts one after the other.

    A fleet that does not fit into memory is split in two, each half from the last checkpoint on, and so is each half
    that does not fit. Later fleets of the same shape are then no larger than what did fit.

    Args:
        aboard: what it takes along.
        number: which of the study's fleets it is.
        specs: its runs.
        unfinished: its checkpoints.
        stop: whether it is to stop.
    """

    aboard: Aboard
    number: int
    specs: Sequence[RunSpec]
    unfinished: Unfinished
    stop: Stop

    def __post_init__(self) -> None:
        """What all parts have in common."""
        self.common, self.shape = self.specs[0], fleet_shape(self.specs[0])
        self.stream = self.aboard.streams[self.common.data]
        self.steps = steps_of(self.common, self.stream)
        self.noted = False

    def results(self, keep: Callable[[list[Result], Path], None]) -> list[Result]:
        """Those of all runs.

        Args:
            keep: called with the results of each part as soon as there are any, and with the checkpoint that is to be
                deleted once they are put away.
        """
        waiting, kept = [_Part(self.specs)], list[Result]()
        most = self.aboard.most
        while waiting:
            part = waiting.pop(0)
            if len(part.specs) > most.get(self.shape, len(part.specs)):
                waiting = self._split(part) + waiting
                continue
            before = len(kept) * self.steps + sum(len(other.specs) * other.steps for other in waiting)
            results = self._sailed(part, before)
            if results is None:
                self._fewer(len(part.specs))
                waiting.insert(0, part)
                continue
            keep(results, self._own(part))
            kept += results
        return kept

    def _split(self, part: _Part) -> list[_Part]:
        """Parts that fit, each with a checkpoint of its own where there was one."""
        parts = split_evenly(part.specs, self.aboard.most[self.shape])
        steps = self.unfinished.split(parts)
        return [_Part(specs, steps) for specs in parts]

    def _fewer(self, runs: int) -> None:
        """Memory ran out with so many runs: half of them at a time from here on."""
        if runs == 1:
            raise MooringError(
                f"one run of {self.common.network} with batch={self.common.batch} does not fit into the memory of "
                f"{self.aboard.device}: give a smaller batch, or another device"
            )
        half = (runs + 1) // 2
        if self.aboard.deterministic:
            raise MooringError(
                f"{runs} runs of {self.common.network} do not fit into the memory of {self.aboard.device}, and a "
                f"deterministic fleet is not split: give --fleet {half}"
            )
        self.aboard.most[self.shape] = half
        self.aboard.reporter.note(f"out of memory with {runs} runs: going on with {half} at a time")

    def _sailed(self, part: _Part, before: int) -> list[Result] | None:
        """The results of a part, or None where memory ran out; `before` are the run-steps of all the others."""
        results = None
        try:
            with deterministic(self.aboard.deterministic):
                results = self._sail(part, before)
        except (RuntimeError, MemoryError) as error:
            if not ran_out(error):
                raise
        # out here the error is gone, and with it the fleet that its traceback held
        if results is None or self.aboard.device != "cpu":
            release(self.aboard.device)
        return results

    def _sail(self, part: _Part, before: int) -> list[Result]:
        fleet = self._restored(part.specs)
        reporter, runs = self.aboard.reporter, len(part.specs)
        if fleet.stack.mode == "sequential" and not self.noted:
            self.noted = True
            reporter.note(f"{self.common.network} cannot be stacked: its runs train one after the other")

        def tell(fleet: Fleet) -> None:
            reporter.sailing(self.number, Seen.of(fleet), before + runs * fleet.steps)

        if not fleet.specs:  # all of them were lost on the way here
            return fleet.results
        results = fleet.run(_Watch(self._own(part), self.aboard.every, self.stop, tell))
        if fleet.recorder.failure:
            reporter.note(
                f"steps of {self.common.network} could not be recorded, and took longer: {fleet.recorder.failure}"
            )
        return results

    def _restored(self, specs: Sequence[RunSpec]) -> Fleet:
        """The fleet of these runs, where they were when they were last saved."""
        for path in self.unfinished.sources(specs):
            fleet = self._fresh(specs)
            try:
                checkpoint.restore(fleet, path)
            except checkpoint.CheckpointError as error:
                self.aboard.reporter.note(f"{error}; its runs start again")
                path.unlink(missing_ok=True)
                del fleet
            else:
                return fleet
        return self._fresh(specs)

    def _fresh(self, specs: Sequence[RunSpec]) -> Fleet:
        aboard, reject = self.aboard, self.unfinished.reject
        return Fleet(specs, self.stream, device=aboard.device, weights=aboard.weights, reject=reject)

    def _own(self, part: _Part) -> Path:
        return self.unfinished.path([spec.key for spec in part.specs])


class _Watch:
    """Saves a fleet after tasks and every few minutes, and stops it between two steps when asked to."""

    def __init__(self, path: Path, every: float, stop: Stop, tell: Callable[[Fleet], None]) -> None:
        self.path, self.every, self.stop, self.tell = path, every, stop, tell
        self.saved = self.told = time.monotonic()
        self.cost: float | None = None

    def on_step(self, fleet: Fleet) -> None:
        now = time.monotonic()
        if now - self.told >= LOOK_SECONDS:
            self.told = now
            self.tell(fleet)
        if self.stop.asked:
            self.save(fleet)
            raise self.stop.error()
        if now - self.saved >= self.every:
            self.save(fleet)

    def on_task_end(self, fleet: Fleet) -> None:
        cost = checkpoint.size(fleet) / SPEED if self.cost is None else self.cost
        over = fleet.position.task == len(fleet.stream.tasks)
        if not over and cost <= max(QUICK, PART * (time.monotonic() - self.saved)):
            self.save(fleet)
        self.tell(fleet)

    def save(self, fleet: Fleet) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise MooringError(f"cannot write in {self.path.parent} ({error.strerror}): it is in the way") from error
        began = time.monotonic()
        checkpoint.save(fleet, self.path)
        self.saved = time.monotonic()
        self.cost = self.saved - began
