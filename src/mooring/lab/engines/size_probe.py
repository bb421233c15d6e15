"""A trial: a fleet that sails a little way and is thrown away, to see how fast it is and what memory it takes."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from mooring.lab.engines.device_memory import Peak, ran_out, release
from mooring.lab.fleet.fleet import Fleet
from mooring.lab.model.order import batch_sizes
from mooring.lab.model.spec import RunSpec
from mooring.lab.networks.initialization import BackboneWeights
from mooring.lab.streams.slices import limit_images
from mooring.lab.streams.stream import Stream

__all__ = ["STEPS", "TASKS", "Tried", "tried"]

TASKS = 2
"""Pulls act from the second task on."""

STEPS = 16
"""In each task of a trial."""

STRETCH = 4
"""Steps of the last task that are timed together. The first stretch is not: things are still warming up."""

CALM = 1e-6
"""The learning rate and the strength in a trial: a run that diverged would make it faster than it is."""


@dataclass(frozen=True)
class Tried:
    """What a trial showed.

    Attributes:
        runs: how many there were at its end.
        step: seconds that one step of all of them takes.
        took: seconds that the whole trial took.
        peak: bytes on the device at the most; None where nobody counts them.
    """

    runs: int
    step: float
    took: float
    peak: int | None = None

    @property
    def each(self) -> float:
        """Seconds that a step of one run takes.

        Example:
            >>> Tried(runs=8, step=0.004, took=1.0).each
            0.0005
        """
        return self.step / self.runs if self.runs else math.inf


def tried(
    specs: Sequence[RunSpec],
    stream: Stream,
    *,
    device: str = "cpu",
    weights: Mapping[str, BackboneWeights] | None = None,
    now: Callable[[], float] = time.perf_counter,
) -> Tried | None:
    """Let runs sail a little way; None where they do not fit into memory. Global random state stays put.

    Args:
        specs: the runs; of one shape.
        stream: what they go through, in the end; its first images are enough here.
        device: where to compute.
        weights: what backbones start from, by fingerprint.
        now: what time it is.

    Example:
        >>> from mooring.lab.streams import by_class, digits
        >>> stream = by_class(digits(), per_task=2)
        >>> tried([RunSpec("digits", stream.fingerprint, "plain", seed) for seed in range(3)], stream).runs
        3
    """
    found = None
    try:
        with torch.random.fork_rng(devices=[device] if torch.device(device).type == "cuda" else []):
            found = _sailed(specs, stream, device, weights, now)
    except (RuntimeError, MemoryError) as error:
        if not ran_out(error):
            raise
    release(device)  # the fleet is gone, also where it was held by an error
    return found


def _sailed(
    specs: Sequence[RunSpec],
    stream: Stream,
    device: str,
    weights: Mapping[str, BackboneWeights] | None,
    now: Callable[[], float],
) -> Tried:
    began, peak = now(), Peak(device)
    short = limit_images(replace(stream, tasks=stream.tasks[:TASKS]), STEPS * specs[0].batch)
    fewest = min(len(batch_sizes(len(task.train), specs[0].batch)) for task in short.tasks)
    epochs = -(-STEPS // fewest)
    clock = _Clock(device, len(short.tasks) - 1, now)
    fleet = Fleet([_calm(spec, epochs) for spec in specs], short, device=device, weights=weights)
    with suppress(_EnoughError):
        fleet.run(clock)
    return Tried(len(fleet.specs), clock.fastest() / STRETCH, now() - began, peak.bytes())


def _calm(spec: RunSpec, epochs: int) -> RunSpec:
    """The same work on the same shapes, with nothing that could diverge."""
    return replace(spec, lr=CALM, strength=None if spec.strength is None else CALM, epochs=epochs)


class _EnoughError(Exception):
    """Nothing more is to be seen."""


class _Clock:
    """Times the last task's steps, a stretch at a time; the fastest counts, as others may be using the machine too."""

    def __init__(self, device: str, task: int, now: Callable[[], float]) -> None:
        self.device, self.task, self.now = device, task, now
        self.steps, self.marks = 0, list[float]()

    def on_step(self, fleet: Fleet) -> None:
        if fleet.position.task != self.task:
            return
        self.steps += 1
        if self.steps % STRETCH == 0:
            if self.device.startswith("cuda"):
                torch.cuda.synchronize(self.device)
            self.marks.append(self.now())
        if self.steps == STEPS:
            raise _EnoughError

    def on_task_end(self, fleet: Fleet) -> None:
        """The first task's end is not what a study spends its time on."""

    def fastest(self) -> float:
        """Seconds of a stretch; infinite where there was none, as when every run was lost."""
        return min((later - mark for mark, later in pairwise(self.marks)), default=math.inf)
