"""Distillation in a fleet: the gradient of each run's divergence on its kept samples, beside the task's."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from mooring.hold.distillation import LARGEST_RATIO, first_weight
from mooring.rules.pull import per_run
from mooring_lab.fleet.kept_samples import KeptSamples
from mooring_lab.fleet.method_state import Tensors
from mooring_lab.model.spec import RunSpec


class RunDistillation:
    """Kept samples that are distilled, and the weight of their gradient in each run.

    Without a budget the weight is the run's strength. With one, it is set by the controller (`RunBudgets`), and the
    gradient is at most LARGEST_RATIO times as long as the task's, as in `mooring.hold.distillation`.

    Args:
        limited: whether there is a budget.
        specs: the runs.
        samples: what is distilled.

    Attributes:
        weights: float64 of shape (runs,).
    """

    def __init__(self, limited: bool, specs: Sequence[RunSpec], samples: KeptSamples) -> None:
        self.samples, self.limited = samples, limited
        self.set_strengths(specs)

    def set_strengths(self, specs: Sequence[RunSpec]) -> None:
        """Start from the strength of each run."""
        strengths = [spec.strength or 0.0 for spec in specs]
        weights = list(map(first_weight, strengths)) if self.limited else strengths
        self.weights = torch.tensor(weights, dtype=torch.float64, device=self.samples.indices.device)

    def plan(self, runs: int, first: int, steps: int) -> list[Tensor]:
        """Return the kept samples of each step, one batch after the other; each of shape (runs, samples).

        Args:
            runs: the number of runs.
            first: the number of the first step within its task.
            steps: the number of steps.
        """
        batches = self.samples.batches()
        numbers = [batches[step % len(batches)] for step in range(first, first + steps) if batches]
        return [torch.tensor(batch).expand(runs, -1) for batch in numbers]

    def weighted(self, gradients: Tensors, task: Tensors, moored: Collection[str]) -> Tensors:
        """Return what is added to the task's gradients.

        Args:
            gradients: of the mean divergence of each run.
            task: the gradients of the task's loss.
            moored: the parameters that a budget holds; without a budget every parameter learns from the samples.
        """
        if not self.limited:
            return {name: per_run(self.weights.to(g.dtype), g) * g for name, g in gradients.items()}
        held = {name: g for name, g in gradients.items() if name in moored and name in task}
        if not held:
            return {}
        ratio = LARGEST_RATIO * _norms([task[name] for name in held]) / _norms(list(held.values()))
        factors = torch.minimum(ratio.nan_to_num(0.0), self.weights)
        return {name: per_run(factors.to(g.dtype), g) * g for name, g in held.items()}

    def keep(self, rows: Tensor) -> None:
        """Keep only the runs in these rows."""
        self.samples.keep(rows)
        self.weights = self.weights[rows]


def _norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the norm of each run's gradient over all parameters, float64 of shape (runs,)."""
    squares = [tensor.double().square().flatten(1).sum(1) for tensor in tensors]
    return torch.stack(squares).sum(0).sqrt()
