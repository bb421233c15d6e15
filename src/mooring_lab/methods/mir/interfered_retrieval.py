"""MIR: of random candidates from the memory, replay those whose loss rises most under a virtual step.

R. Aljundi, L. Caccia, E. Belilovsky, M. Caccia, M. Lin, L. Charlin, T. Tuytelaars: Online continual learning with
maximally interfered retrieval, NeurIPS 2019. The virtual step is theta - lr * g, with the gradient of the batch. It and
the losses of the candidates are computed in evaluation mode, so that choosing samples changes no running statistics.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mooring.rules.pull import per_run
from mooring_lab.fleet.learner_plugin import Step
from mooring_lab.fleet.replay_memory import ReplayMemory

if TYPE_CHECKING:
    from mooring_lab.fleet.fleet import Fleet


class InterferedRetrieval(ReplayMemory):
    """Batches with the samples that they would interfere with; each sample is trained with its own task's head."""

    def choose_batch(self, fleet: Fleet, step: Step) -> None:
        """Add as many candidates as the batch has samples."""
        step.head_task = None
        if step.replayed is not None:
            count = min(step.indices.shape[1], step.replayed.shape[1])
            chosen = self._rises(fleet, step.indices, step.replayed).topk(count, 1).indices
            step.indices = torch.cat([step.indices, step.replayed.gather(1, chosen)], 1)

    def _rises(self, fleet: Fleet, batch: Tensor, candidates: Tensor) -> Tensor:
        """Return how much a step on the batch alone raises the loss of each candidate, of shape (runs, candidates)."""
        stack, gradients = fleet.stack, fleet.passes.validation_gradients(batch)
        with torch.no_grad():
            before = fleet.passes.sample_losses(candidates, None, evaluate=True)[1]
            stepped = {n: stack.parameters[n] - per_run(fleet.optimizer.lr, g) * g for n, g in gradients.items()}
            with stack.replaced_by({**stack.parameters, **stack.buffers, **stepped}):
                return fleet.passes.sample_losses(candidates, None, evaluate=True)[1] - before
