"""The loss of every run over a task, in a few points."""

import torch
from torch import Tensor

__all__ = ["Curve"]

POINTS = 20
"""Into how many stretches a task is cut."""


class Curve:
    """Sums of losses over each stretch of a task, on the device.

    Args:
        runs: how many.
        device: where it lies.

    Example:
        >>> curve = Curve(1)
        >>> for step in range(3):
        ...     curve.add(torch.tensor([step]), 3, torch.tensor([float(step)]))
        >>> curve.means(3)
        [[0.0, 1.0, 2.0]]
    """

    def __init__(self, runs: int, device: torch.device | str = "cpu") -> None:
        self.sums = torch.zeros(runs, POINTS, dtype=torch.float64, device=device)

    def add(self, step: Tensor, steps: int, losses: Tensor) -> None:
        """Add a step.

        Args:
            step: which of the task's, int64 of shape (1,).
            steps: how many the task has.
            losses: of shape (runs,).
        """
        self.sums.index_add_(1, step * POINTS // steps, losses.double().unsqueeze(1))

    def means(self, steps: int) -> list[list[float]]:
        """The mean loss in each stretch that has steps, of each run."""
        counts = torch.bincount(torch.arange(steps) * POINTS // steps, minlength=POINTS)
        some = counts.nonzero().flatten()
        means: list[list[float]] = (self.sums.cpu()[:, some] / counts[some]).tolist()
        return means

    def reset(self) -> None:
        """A new task begins."""
        self.sums.zero_()

    def keep(self, rows: Tensor) -> None:
        """Go on with these runs."""
        self.sums = self.sums[rows]
