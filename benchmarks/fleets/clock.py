"""A clock for the steps of a task, whoever takes them."""

import time

import torch

from mooring.errors import MooringError
from mooring.lab.fleet.fleet import Fleet

__all__ = ["WARM", "Clock", "now"]

WARM = 10
"""Steps before the clock starts. On a GPU the first ones of a task also capture a graph."""


def now(device: str) -> float:
    """The time, once the device has done what it was told."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter()


class Clock:
    """Times the steps of the second task without its first ones. The device is waited for at both ends only."""

    def __init__(self, device: str) -> None:
        self.device, self.seconds, self.steps = device, 0.0, 0
        self.began: tuple[float, int] | None = None
        self.done = 0

    @property
    def us(self) -> float:
        """Microseconds a step."""
        if not self.steps:
            raise MooringError(f"no step was timed: the second task has no more than {WARM}")
        return self.seconds / self.steps * 1e6

    def step(self, task: int, done: int) -> None:
        """A step is over, the `done`-th of its task."""
        self.done = done
        if task == 1 and done >= WARM and self.began is None:
            self.began = now(self.device), done

    def stop(self) -> None:
        """Add what passed since the clock started."""
        if self.began is not None:
            self.seconds += now(self.device) - self.began[0]
            self.steps += self.done - self.began[1]
            self.began = None

    def on_step(self, fleet: Fleet) -> None:
        """A fleet took a step."""
        self.step(fleet.position.task, fleet.position.step)
        if fleet.position.task == 1 and fleet.position.step * fleet.common.batch >= len(fleet.stream.tasks[1].train):
            self.stop()

    def on_task_end(self, fleet: Fleet) -> None:
        """A fleet ended a task."""
