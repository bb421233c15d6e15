"""The training loss of every run over a task, averaged over a fixed number of intervals."""

import torch
from torch import Tensor

__all__ = ["LossHistory"]

INTERVALS = 20
"""Number of intervals into which the steps of a task are divided."""


class LossHistory:
    """Sums of the losses in each interval of a task, on the device.

    Args:
        runs: the number of runs.
        device: where the sums are stored.

    Attributes:
        sums: float64 of shape (runs, INTERVALS).

    Example:
        >>> history = LossHistory(1)
        >>> for step in range(3):
        ...     history.add(torch.tensor([step]), 3, torch.tensor([float(step)]))
        >>> history.means(3)
        [[0.0, 1.0, 2.0]]
    """

    def __init__(self, runs: int, device: torch.device | str = "cpu") -> None:
        self.sums = torch.zeros(runs, INTERVALS, dtype=torch.float64, device=device)

    def add(self, step: Tensor, steps: int, losses: Tensor) -> None:
        """Add the losses of one step.

        Args:
            step: the number of the step within the task, int64 of shape (1,).
            steps: the number of steps in the task.
            losses: of shape (runs,).
        """
        self.sums.index_add_(1, step * INTERVALS // steps, losses.double().unsqueeze(1))

    def means(self, steps: int) -> list[list[float]]:
        """Return the mean loss of each run in each interval that contains steps."""
        counts = torch.bincount(torch.arange(steps) * INTERVALS // steps, minlength=INTERVALS)
        filled = counts.nonzero().flatten()
        means: list[list[float]] = (self.sums.cpu()[:, filled] / counts[filled]).tolist()
        return means

    def reset(self) -> None:
        """Clear the sums for a new task."""
        self.sums.zero_()

    def keep(self, rows: Tensor) -> None:
        """Keep only the runs in these rows."""
        self.sums = self.sums[rows]
