"""The size of fleets: as many runs as fit into memory, and no more than make training faster.

A probe measures speed and memory: a fleet that trains for a few steps and is discarded.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch

from mooring_lab.engines.device_memory import PeakMemory, free_memory, is_out_of_memory, release_memory
from mooring_lab.engines.runner import steps_per_run
from mooring_lab.fleet.evaluation import resident_bytes
from mooring_lab.fleet.fleet import Fleet
from mooring_lab.fleet.grouping import fleet_shape, split_evenly
from mooring_lab.methods import find_method
from mooring_lab.model.order import batch_sizes
from mooring_lab.model.spec import RunSpec
from mooring_lab.networks.initialization import BackboneWeights, initial_network
from mooring_lab.streams.slices import limit_images
from mooring_lab.streams.stream import Stream

MAX_RUNS = {"cpu": 128, "cuda": 512}
"""The largest fleet by default, by kind of device. On a CPU larger ones do not fit into its caches."""

MAX_RUNS_UNPROBED = 16
"""So many runs are trained together without a probe."""

MIN_PROBED_WORK = {"cpu": 100_000, "cuda": 1_000_000}
"""How many run-steps a study needs for a probe to pay, by kind of device. A GPU is faster, and compiles first."""

FIRST_PROBE_RUNS = 8
"""The runs in the first probe; each later one has twice as many as the one before."""

MIN_SPEEDUP = 1.08
"""By what factor twice as many runs must be faster for twice as many again to be probed."""

MAX_PROBE_SHARE = 0.02
"""After two probes, another one may take no more than this share of the study's remaining time."""

MAX_OVERSIZE = 1.5
"""So many times the best size are still trained together, instead of as two much smaller fleets."""

MEASURED_MEMORY_SHARE, ESTIMATED_MEMORY_SHARE = 0.8, 0.5
"""The share of the free memory that is used: if a run's memory was measured, and if it was estimated."""

NOMINAL_BYTES = {"cpu": 4 << 30, "cuda": 16 << 30}
"""The free memory that is assumed if the number of runs must be the same each time."""


PROBE_TASKS = 2
"""Pulls act from the second task on."""

PROBE_STEPS = 16
"""The steps of each task of a probe."""

TIMED_STEPS = 4
"""Steps of the last task that are timed together. The first such stretch is a warm-up and does not count."""

SAFE_VALUE = 1e-6
"""The learning rate and the strength in a probe: runs that diverge are taken out, which would make it look faster."""


@dataclass(frozen=True)
class SizeProbe:
    """The outcome of a probe.

    Attributes:
        runs: how many runs were left at its end.
        step_seconds: how long one step of all runs takes.
        total_seconds: how long the whole probe took.
        peak_bytes: the peak memory on the device; None if it is not counted.
    """

    runs: int
    step_seconds: float
    total_seconds: float
    peak_bytes: int | None = None

    @property
    def run_step_seconds(self) -> float:
        """How long a step of one run takes.

        Example:
            >>> SizeProbe(runs=8, step_seconds=0.004, total_seconds=1.0).run_step_seconds
            0.0005
        """
        return self.step_seconds / self.runs if self.runs else math.inf


def probe_size(
    specs: Sequence[RunSpec],
    stream: Stream,
    *,
    device: str = "cpu",
    weights: Mapping[str, BackboneWeights] | None = None,
    now: Callable[[], float] = time.perf_counter,
) -> SizeProbe | None:
    """Train runs together for a few steps; return None if they do not fit into memory.

    The global random state is left as it was.

    Args:
        specs: the runs, all of one shape.
        stream: their stream; only its first images are used.
        device: the device to train on.
        weights: the initial weights of backbones by fingerprint.
        now: the clock.

    Example:
        >>> from mooring_lab.streams import by_class, digits
        >>> stream = by_class(digits(), per_task=2)
        >>> probe_size([RunSpec("digits", stream.fingerprint, "plain", seed) for seed in range(3)], stream).runs
        3
    """
    probe = None
    try:
        with torch.random.fork_rng(devices=[device] if torch.device(device).type == "cuda" else []):
            probe = _train_briefly(specs, stream, device, weights, now)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    release_memory(device)  # here neither a frame nor the error's traceback holds the fleet
    return probe


def _train_briefly(
    specs: Sequence[RunSpec],
    stream: Stream,
    device: str,
    weights: Mapping[str, BackboneWeights] | None,
    now: Callable[[], float],
) -> SizeProbe:
    start, peak = now(), PeakMemory(device)
    short = limit_images(replace(stream, tasks=stream.tasks[:PROBE_TASKS]), PROBE_STEPS * specs[0].batch)
    steps_per_epoch = min(len(batch_sizes(len(task.train), specs[0].batch)) for task in short.tasks)
    epochs = -(-PROBE_STEPS // steps_per_epoch)
    timer = _StepTimer(device, len(short.tasks) - 1, now)
    safe = [
        replace(spec, lr=SAFE_VALUE, strength=None if spec.strength is None else SAFE_VALUE, epochs=epochs)
        for spec in specs
    ]
    fleet = Fleet(safe, short, device=device, weights=weights)
    with suppress(_EndOfProbeError):
        fleet.run(timer)
    return SizeProbe(len(fleet.specs), timer.fastest() / TIMED_STEPS, now() - start, peak.bytes())


class _EndOfProbeError(Exception):
    """The probe has taken all its steps."""


class _StepTimer:
    """A callback that times the last task's steps. The fastest stretch counts: others may use the machine too."""

    def __init__(self, device: str, task: int, now: Callable[[], float]) -> None:
        self.device, self.task, self.now = device, task, now
        self.steps, self.marks = 0, list[float]()

    def on_step(self, fleet: Fleet) -> None:
        if fleet.position.task != self.task:
            return
        self.steps += 1
        if self.steps % TIMED_STEPS == 0:
            if self.device.startswith("cuda"):
                torch.cuda.synchronize(self.device)
            self.marks.append(self.now())
        if self.steps == PROBE_STEPS:
            raise _EndOfProbeError

    def on_task_end(self, fleet: Fleet) -> None:
        """Do nothing: the end of a task takes little of a study's time."""

    def fastest(self) -> float:
        """Return the seconds of the fastest stretch; infinity if there was none, as when every run was lost."""
        return min((later - mark for mark, later in pairwise(self.marks)), default=math.inf)


@dataclass(frozen=True)
class FleetSize:
    """The size of fleets of one shape.

    Attributes:
        best: the number of runs that is fastest, of those that fit.
        fits: the number of runs that fit into memory.
        reason: what was measured; empty if there was no probe.
    """

    best: int
    fits: int
    reason: str = ""

    def limit(self, runs: int) -> int:
        """Return the largest fleet to make of so many runs in all.

        Example:
            >>> [FleetSize(best=64, fits=1000).limit(runs) for runs in (40, 96, 97)]
            [40, 96, 64]
        """
        return runs if runs <= min(self.fits, MAX_OVERSIZE * self.best) else min(self.best, self.fits)


MeasuredSizes = dict[tuple[object, ...], tuple[int, FleetSize]]
"""The runs that probes were for and the size that they led to, by the shape of the runs and of their stream."""


@dataclass
class FleetSizer:
    """A function from runs of one shape to how many of them to train together; each shape is measured once.

    Args:
        streams: the streams by fingerprint.
        weights: the initial weights of backbones by fingerprint.
        device: the device to train on.
        note: called with a line about the size that a probe led to.
        probe: trains runs for a few steps; see `probe_size`.
        free: returns the free bytes of a device.
        fixed: use an estimate and a nominal memory instead of measurements, so that sizes are the same each time.
        measured: what earlier probes measured; receives what new ones do, so that a study probes a shape only once.

    Example:
        >>> from mooring_lab.streams import by_class, digits
        >>> stream = by_class(digits(), per_task=2)
        >>> specs = [RunSpec("digits", stream.fingerprint, "plain", seed) for seed in range(12)]
        >>> FleetSizer({stream.fingerprint: stream})(specs)
        12
    """

    streams: Mapping[str, Stream]
    weights: Mapping[str, BackboneWeights] = field(default_factory=dict)
    device: str = "cpu"
    note: Callable[[str], None] = lambda line: None
    probe: Callable[..., SizeProbe | None] = probe_size
    free: Callable[[str], int] = free_memory
    fixed: bool = False
    measured: MeasuredSizes = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Start with no sizes."""
        self.kind = torch.device(self.device).type
        self.known: dict[tuple[object, ...], FleetSize] = {}

    def __call__(self, runs: Sequence[RunSpec]) -> int:
        """Return how many of these runs, which are of one shape, to train together at most."""
        key = fleet_shape(runs[0])
        if key not in self.known:
            self.known[key] = self._size(runs)
            if self.known[key].reason:
                parts = split_evenly(runs, self.known[key].limit(len(runs)))
                amount = f"{len(parts[0])} at a time" if len(parts) > 1 else "all at once"
                self.note(f"{len(runs)} runs of {runs[0].network}, {amount}: {self.known[key].reason}")
        return self.known[key].limit(len(runs))

    def _size(self, runs: Sequence[RunSpec]) -> FleetSize:
        """Return the size by probes if they pay, else by an estimate."""
        spec, stream = runs[0], self.streams[runs[0].data]
        estimate = self._estimate(spec, stream)
        work = len(runs) * steps_per_run(spec, stream)
        # On a CPU memory is only estimated, so a small estimate decides without a probe.
        is_small = self.kind == "cpu" and estimate.best < 2 * FIRST_PROBE_RUNS
        if self.fixed or len(runs) <= MAX_RUNS_UNPROBED or work < MIN_PROBED_WORK[self.kind] or is_small:
            return estimate
        # Other tasks hardly change the time of a step or the memory of a run.
        shape = (stream.shape, stream.outputs, fleet_shape(replace(spec, data="")))
        before, size = self.measured.get(shape, (0, estimate))
        if before < len(runs) and before <= MAX_OVERSIZE * size.best:  # more runs than before may be faster at once
            size = self._measure(sorted(runs, key=_memory_rank, reverse=True), stream, estimate, work)
            self.measured[shape] = len(runs), size
        return size

    def _estimate(self, spec: RunSpec, stream: Stream) -> FleetSize:
        """Estimate a run's memory: 12 numbers for each weight, 200 for each pixel of a batch."""
        weights = sum(p.numel() for p in initial_network(spec.network, stream, 0).parameters())
        pixels = stream.train.images[0].numel() * spec.batch
        run_bytes = (8 if spec.dtype == "float64" else 4) * (12 * weights + 200 * pixels)
        free_bytes = NOMINAL_BYTES[self.kind] if self.fixed else self.free(self.device)
        fits = max(1, int(ESTIMATED_MEMORY_SHARE * free_bytes) // run_bytes)
        return FleetSize(min(fits, MAX_RUNS[self.kind]), fits)

    def _measure(self, runs: Sequence[RunSpec], stream: Stream, estimate: FleetSize, work: int) -> FleetSize:
        """Probe fleets, each twice as large as the one before, while that makes them faster.

        The runs that take most memory come first; `work` is how many run-steps have to be trained.
        """
        free_bytes = self.free(self.device)
        room = MEASURED_MEMORY_SHARE * free_bytes - stream.train.images.nbytes - resident_bytes(stream.test)
        probes: list[SizeProbe] = []
        size = FIRST_PROBE_RUNS
        while True:
            probe = self._probe(runs[:size], stream, probes)
            if probe is None:
                best = probes[-1].runs if probes else size // 2
                return FleetSize(best, best, _reason(probes, "more do not fit into memory"))
            if probe.runs < size:
                return estimate  # some runs were lost, so that the measurement says nothing
            probes.append(probe)
            fits = estimate.fits if probe.peak_bytes is None else _fits(probes, room)
            if len(probes) > 1 and _is_no_faster(probe, probes[-2]):
                best = min(probes, key=lambda probe: probe.run_step_seconds).runs
                return FleetSize(best, fits, _reason(probes, "more at once are no faster"))
            if len(runs) <= min(fits, MAX_OVERSIZE * size):
                return FleetSize(size, fits, _reason(probes))
            larger = min(2 * size, fits, MAX_RUNS[self.kind], len(runs))
            if larger < MAX_OVERSIZE * size:
                reason = "more do not fit into memory" if larger == fits else "more are seldom faster"
                return FleetSize(larger, fits, _reason(probes, reason))
            if len(probes) > 1 and 2 * probe.total_seconds > MAX_PROBE_SHARE * work * probe.run_step_seconds:
                return FleetSize(min(fits, MAX_RUNS[self.kind]), fits)  # another probe would cost more than it saves
            size = larger

    def _probe(self, runs: Sequence[RunSpec], stream: Stream, probes: Sequence[SizeProbe]) -> SizeProbe | None:
        """Probe once, and again if that was no faster than the last size: something else may have used the machine."""
        probe = self.probe(runs, stream, device=self.device, weights=self.weights)
        if probe is not None and probes and _is_no_faster(probe, probes[-1]):
            again = self.probe(runs, stream, device=self.device, weights=self.weights)
            probe = again and min(probe, again, key=lambda probe: probe.run_step_seconds)
        return probe


def _is_no_faster(probe: SizeProbe, smaller: SizeProbe) -> bool:
    return smaller.run_step_seconds < MIN_SPEEDUP * probe.run_step_seconds


def _memory_rank(spec: RunSpec) -> int:
    """Rank a run by what its method stores: no importance, an importance, or one that also stores the last step."""
    importance = find_method(spec.method).importance
    return 0 if importance is None else 1 + importance(0).needs_step


def _fits(probes: Sequence[SizeProbe], room: float) -> int:
    """Return how many runs fit, from the fixed and the per-run memory that the last two probes show.

    Example:
        >>> _fits([SizeProbe(8, 0.1, 1, peak_bytes=1800), SizeProbe(16, 0.1, 1, peak_bytes=2600)], room=11_000)
        100
        >>> _fits([SizeProbe(8, 0.1, 1, peak_bytes=1800)], room=11_000)  # a lower bound: all memory counts as per run
        48
    """
    last, before = probes[-1], probes[-2] if len(probes) > 1 else SizeProbe(0, 0.0, 0.0)
    peak = last.peak_bytes or 0
    run_bytes = max(1.0, (peak - (before.peak_bytes or 0)) / (last.runs - before.runs))
    return max(1, int((room - peak) / run_bytes + last.runs))


def _reason(probes: Sequence[SizeProbe], limit: str = "") -> str:
    """Return the fastest time measured, and what limited the size."""
    seconds = min((probe.run_step_seconds for probe in probes), default=0.0)
    duration = f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"
    return ", and ".join(part for part in (f"{duration} for a step of each" if probes else "", limit) if part)
