"""A size probe: a fleet that trains for a few steps and is discarded, to measure its speed and its memory."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from mooring.lab.engines.device_memory import PeakMemory, is_out_of_memory, release_memory
from mooring.lab.fleet.fleet import Fleet
from mooring.lab.model.order import batch_sizes
from mooring.lab.model.spec import RunSpec
from mooring.lab.networks.initialization import BackboneWeights
from mooring.lab.streams.slices import limit_images
from mooring.lab.streams.stream import Stream

__all__ = ["PROBE_STEPS", "PROBE_TASKS", "SizeProbe", "probe_size"]

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
        >>> from mooring.lab.streams import by_class, digits
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
