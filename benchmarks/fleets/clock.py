"""A clock for the training steps of a task."""

import time

import torch

from mooring.errors import MooringError
from mooring_lab.fleet.fleet import Fleet

__all__ = ["WARMUP_STEPS", "Clock", "now"]

WARMUP_STEPS = 10
"""The number of steps before the clock starts. On a GPU the first steps of a task also capture a graph."""


def now(device: str) -> float:
    """Return the time after the device has finished its work."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter()


class Clock:
    """A timer of the second task's steps without its warm-up. It waits for the device only at the start and the end."""

    def __init__(self, device: str) -> None:
        self.device, self.seconds, self.steps = device, 0.0, 0
        self.started: tuple[float, int] | None = None
        self.done = 0

    @property
    def us(self) -> float:
        """The microseconds per step."""
        if not self.steps:
            raise MooringError(f"no step was timed: the second task has no more than {WARMUP_STEPS}")
        return self.seconds / self.steps * 1e6

    def step(self, task: int, done: int) -> None:
        """Record that `done` steps of a task are finished."""
        self.done = done
        if task == 1 and done >= WARMUP_STEPS and self.started is None:
            self.started = now(self.device), done

    def stop(self) -> None:
        """Add the time and the steps since the clock started."""
        if self.started is not None:
            self.seconds += now(self.device) - self.started[0]
            self.steps += self.done - self.started[1]
            self.started = None

    def on_step(self, fleet: Fleet) -> None:
        """Record a step of a fleet."""
        self.step(fleet.position.task, fleet.position.step)
        if fleet.position.task == 1 and fleet.position.step * fleet.common.batch >= len(fleet.stream.tasks[1].train):
            self.stop()

    def on_task_end(self, fleet: Fleet) -> None:
        """Do nothing at the end of a task."""
