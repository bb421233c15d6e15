"""The training of one fleet from its last checkpoint, in parts if memory runs out, and the reports of its progress."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mooring.errors import MooringError
from mooring_lab.engines.checkpoint_index import CheckpointIndex
from mooring_lab.engines.device_memory import is_out_of_memory, release_memory
from mooring_lab.engines.signals import StopRequest
from mooring_lab.fleet import checkpoint
from mooring_lab.fleet.fleet import Fleet
from mooring_lab.fleet.fleet_callback import Position
from mooring_lab.fleet.grouping import fleet_shape, split_evenly
from mooring_lab.methods import find_method
from mooring_lab.model.order import batch_sizes
from mooring_lab.model.precision import deterministic
from mooring_lab.model.results import Result
from mooring_lab.model.spec import RunSpec
from mooring_lab.networks.initialization import BackboneWeights
from mooring_lab.streams.stream import Stream

KeepResults = Callable[[list[Result]], None]
"""A function that stores the results of a fleet, or of a part of it."""

CHECKPOINT_SECONDS = 120.0
REPORT_SECONDS = 0.1

MAX_SAVING_SHARE = 0.02
"""The share of the time that checkpoints may take; a large fleet skips some."""

ALLOWED_SAVE_SECONDS = 0.01
"""A checkpoint that takes no longer than this is always written."""

ASSUMED_BYTES_PER_SECOND = 2e8
"""The speed of copying, hashing and writing a checkpoint, until it has been measured."""


def steps_per_run(spec: RunSpec, stream: Stream) -> int:
    """Return how many steps a run takes.

    Example:
        >>> from mooring_lab.streams import by_class, digits
        >>> stream = by_class(digits(), per_task=5)
        >>> steps_per_run(RunSpec("digits", stream.fingerprint, "plain", 0, epochs=2, batch=500), stream)
        8
    """
    batches = sum(len(batch_sizes(len(task.train), spec.batch)) for task in stream.tasks)
    return batches * find_method(spec.method).updates * spec.epochs


@dataclass(frozen=True)
class FleetProgress:
    """The progress of a fleet, as plain values that can be sent from another machine.

    Attributes:
        runs: how many runs it has.
        position: the task, epoch and step it has reached.
        steps: how many steps it has taken.
        tasks: how many tasks its stream has.
        accuracy: the mean accuracy of its runs on the finished tasks, in percent; None before the first is finished.

    Example:
        >>> FleetProgress(runs=2, position=Position(task=1), steps=18, tasks=5).accuracy is None
        True
    """

    runs: int
    position: Position
    steps: int
    tasks: int
    accuracy: float | None = None

    @classmethod
    def of(cls, fleet: Fleet) -> "FleetProgress":
        """Return the progress of a fleet now."""
        rows = [record.matrix[-1][: len(record.matrix)] for record in fleet.measured.records if record.matrix]
        accuracy = sum(sum(row) / len(row) for row in rows) / len(rows) if rows else None
        return cls(len(fleet.specs), fleet.position, fleet.steps, len(fleet.stream.tasks), accuracy)


class Reporter:
    """A receiver of the progress of a study; each method does nothing unless a subclass overrides it."""

    def begin(self, fleets: Sequence[Sequence[RunSpec]], work: Sequence[int], done: int) -> None:
        """Receive the fleets to train, the run-steps of each, and how many runs have a result already."""

    def advanced(self, number: int, fleet: FleetProgress, done: int) -> None:
        """Receive the progress of a fleet; called at a limited rate.

        Args:
            number: which of the fleets.
            fleet: the progress of that fleet, or of the part of it that is trained now if it did not fit into memory.
            done: how many run-steps of the fleet are done. It decreases after memory ran out.
        """

    def finished(self, number: int, results: Sequence[Result]) -> None:
        """Receive the results of a fleet, once all of them are stored."""

    def note(self, line: str) -> None:
        """Receive a line that the user should read."""

    def close(self) -> None:
        """Stop reporting, whether the study finished or failed."""


class SilentReporter(Reporter):
    """A reporter that does nothing."""


@dataclass
class RunContext:
    """What all fleets of a study share.

    Attributes:
        streams: the streams by fingerprint.
        weights: the initial weights of backbones by fingerprint.
        device: the device to train on.
        checkpoint_seconds: seconds between checkpoints within a task.
        reporter: the receiver of progress.
        deterministic: whether every run gives the same bits each time; then fleets are not split.
        max_runs: how many runs of a shape fit into memory, for shapes that ran out of it.
    """

    streams: Mapping[str, Stream]
    weights: Mapping[str, BackboneWeights]
    device: str = "cpu"
    checkpoint_seconds: float = CHECKPOINT_SECONDS
    reporter: Reporter = field(default_factory=SilentReporter)
    deterministic: bool = False
    max_runs: dict[tuple[object, ...], int] = field(default_factory=dict)


@dataclass
class _FleetPart:
    """Runs that are trained together, and how many steps they had taken at their checkpoint."""

    specs: Sequence[RunSpec]
    steps: int = 0


@dataclass
class FleetRunner:
    """The training of one fleet, whole or in parts one after the other.

    A fleet that does not fit into memory is split in two; each half continues from the last checkpoint, and is split
    again if it does not fit. Later fleets of the same shape start no larger than what did fit.

    Args:
        context: what all fleets of the study share.
        number: which of the study's fleets this is.
        specs: its runs.
        index: the checkpoints of the study.
        stop: whether to stop.
    """

    context: RunContext
    number: int
    specs: Sequence[RunSpec]
    index: CheckpointIndex
    stop: StopRequest

    def __post_init__(self) -> None:
        """Derive what all parts have in common."""
        self.common, self.shape = self.specs[0], fleet_shape(self.specs[0])
        self.stream = self.context.streams[self.common.data]
        self.steps = steps_per_run(self.common, self.stream)
        self.noted_slow_stack = False

    def run(self, keep: Callable[[list[Result], Path], None]) -> list[Result]:
        """Train all runs and return their results.

        Args:
            keep: called with the results of each part as soon as they exist, and with the checkpoint to delete once
                the results are stored.
        """
        waiting, results = [_FleetPart(self.specs)], list[Result]()
        max_runs = self.context.max_runs
        while waiting:
            part = waiting.pop(0)
            if len(part.specs) > max_runs.get(self.shape, len(part.specs)):
                parts = split_evenly(part.specs, max_runs[self.shape])
                steps = self.index.split(parts)  # each part gets its own checkpoint if there was one
                waiting = [_FleetPart(specs, steps) for specs in parts] + waiting
                continue
            other_steps = len(results) * self.steps + sum(len(other.specs) * other.steps for other in waiting)
            part_results = self._run_part(part, other_steps)
            if part_results is None:
                self._halve(len(part.specs))
                waiting.insert(0, part)
                continue
            keep(part_results, self._path(part))
            results += part_results
        return results

    def _halve(self, runs: int) -> None:
        """Allow half as many runs of this shape from here on, because memory ran out."""
        network, device = self.common.network, self.context.device
        if runs == 1:
            raise MooringError(
                f"one run of {network} with batch={self.common.batch} does not fit into the memory of {device}: "
                "give a smaller batch, or another device"
            )
        half = (runs + 1) // 2
        if self.context.deterministic:
            raise MooringError(
                f"{runs} runs of {network} do not fit into the memory of {device}, and a deterministic fleet is not "
                f"split: give --fleet {half}"
            )
        self.context.max_runs[self.shape] = half
        self.context.reporter.note(f"out of memory with {runs} runs: going on with {half} at a time")

    def _run_part(self, part: _FleetPart, other_steps: int) -> list[Result] | None:
        """Return the results of a part, or None if memory ran out; `other_steps` are the run-steps of other parts."""
        results = None
        try:
            with deterministic(self.context.deterministic):
                results = self._train(part, other_steps)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        # Release only here: inside the handler the error's traceback still holds the fleet.
        if results is None or self.context.device != "cpu":
            release_memory(self.context.device)
        return results

    def _train(self, part: _FleetPart, other_steps: int) -> list[Result]:
        fleet = self._restore(part.specs)
        reporter, runs = self.context.reporter, len(part.specs)
        if fleet.stack.mode == "sequential" and not self.noted_slow_stack:
            self.noted_slow_stack = True
            reporter.note(f"{self.common.network} cannot be stacked: its runs train one after the other")

        def report(fleet: Fleet) -> None:
            reporter.advanced(self.number, FleetProgress.of(fleet), other_steps + runs * fleet.steps)

        if not fleet.specs:  # all of them were stopped before the checkpoint
            return fleet.measured.results
        results = fleet.run(_CheckpointCallback(self._path(part), self.context.checkpoint_seconds, self.stop, report))
        if fleet.recorder.failure:
            reporter.note(
                f"steps of {self.common.network} could not be recorded, and took longer: {fleet.recorder.failure}"
            )
        return results

    def _restore(self, specs: Sequence[RunSpec]) -> Fleet:
        """Return the fleet of these runs, as it was at their last checkpoint."""
        for path in self.index.sources(specs):
            fleet = self._new_fleet(specs)
            try:
                checkpoint.restore(fleet, path)
            except checkpoint.CheckpointError as error:
                self.context.reporter.note(f"{error}; its runs start again")
                path.unlink(missing_ok=True)
                del fleet  # before the next one is built: memory may hold only one
            else:
                return fleet
        return self._new_fleet(specs)

    def _new_fleet(self, specs: Sequence[RunSpec]) -> Fleet:
        context = self.context
        return Fleet(specs, self.stream, device=context.device, weights=context.weights, reject=self.index.reject)

    def _path(self, part: _FleetPart) -> Path:
        return self.index.path([spec.key for spec in part.specs])


class _CheckpointCallback:
    """A callback that saves a fleet after tasks and at intervals, and stops it between two steps when asked."""

    def __init__(self, path: Path, seconds: float, stop: StopRequest, report: Callable[[Fleet], None]) -> None:
        self.path, self.seconds, self.stop, self.report = path, seconds, stop, report
        self.saved_at = self.reported_at = time.monotonic()
        self.save_seconds: float | None = None

    def on_step(self, fleet: Fleet) -> None:
        now = time.monotonic()
        if now - self.reported_at >= REPORT_SECONDS:
            self.reported_at = now
            self.report(fleet)
        if self.stop.asked:
            self.save(fleet)
            raise self.stop.error()
        if now - self.saved_at >= self.seconds:
            self._save_if_cheap(fleet)

    def on_task_end(self, fleet: Fleet) -> None:
        if fleet.position.task < len(fleet.stream.tasks):
            self._save_if_cheap(fleet)
        self.report(fleet)

    def _save_if_cheap(self, fleet: Fleet) -> None:
        """Save the fleet if that takes a small share of the time since it was saved last."""
        if self.save_seconds is None:
            self.save_seconds = checkpoint.size(fleet) / ASSUMED_BYTES_PER_SECOND
        elapsed = time.monotonic() - self.saved_at
        if self.save_seconds <= max(ALLOWED_SAVE_SECONDS, MAX_SAVING_SHARE * elapsed):
            self.save(fleet)

    def save(self, fleet: Fleet) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise MooringError(
                f"cannot create the folder {self.path.parent} ({error.strerror}): move what has its name, or choose "
                "another place with --study"
            ) from error
        start = time.monotonic()
        checkpoint.save(fleet, self.path)
        self.saved_at = time.monotonic()
        self.save_seconds = self.saved_at - start
