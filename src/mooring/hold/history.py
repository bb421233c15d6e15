"""The values that were measured in training, for logs and figures."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

MAX_POINTS = 4096
"""Above this number every second point of the first half is dropped, so that a long training keeps a short history."""


class MeasuredPoint(NamedTuple):
    """What was measured after a step.

    Attributes:
        task: the number of consolidated tasks at that time.
        step: the number of steps in the task.
        nats: the measured forgetting.
        named: the budget.
    """

    task: int
    step: int
    nats: float
    named: float


class MeasuredHistory(Sequence[MeasuredPoint]):
    """The measured values in their order.

    Example:
        >>> history = MeasuredHistory()
        >>> history.add(MeasuredPoint(task=1, step=7, nats=0.02, named=0.1))
        >>> len(history), history[-1].nats
        (1, 0.02)
    """

    def __init__(self, points: Sequence[Sequence[float]] = ()) -> None:
        self._points = [
            MeasuredPoint(int(task), int(step), float(nats), float(named)) for task, step, nats, named in points
        ]

    def __len__(self) -> int:
        return len(self._points)

    def __getitem__(self, index: int) -> MeasuredPoint:  # type: ignore[override]
        return self._points[index]

    def __iter__(self) -> Iterator[MeasuredPoint]:
        return iter(self._points)

    def add(self, point: MeasuredPoint) -> None:
        """Append a point, and thin out old ones if there are many."""
        self._points.append(point)
        if len(self._points) > MAX_POINTS:
            half = len(self._points) // 2
            self._points = self._points[:half:2] + self._points[half:]

    def plain(self) -> list[list[float]]:
        """Return the points as lists, for a saved state."""
        return [list(point) for point in self._points]
