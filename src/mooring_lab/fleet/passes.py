"""Forward and backward passes of the runs of a fleet over images of its stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from mooring_lab.fleet.data import TrainingData
from mooring_lab.fleet.gradient_sharing import GradientSharing
from mooring_lab.fleet.learner_plugin import Step, Tensors
from mooring_lab.fleet.stack.stack import Stack

if TYPE_CHECKING:
    from mooring_lab.fleet.fleet import Fleet


class Passes:
    """Losses of batches of every run, and their gradients.

    Args:
        stack: the runs.
        data: the images.

    Attributes:
        outputs: the number of outputs of a head that are in use, those of the classes that have come so far.
        train: whether the networks are in training mode.
        sharing: which runs have the same gradients so far.
    """

    def __init__(self, stack: Stack, data: TrainingData) -> None:
        self.stack, self.data = stack, data
        self.outputs, self.train = data.stream.outputs, True
        self.sharing = GradientSharing()

    def start_task(self, outputs: int) -> None:
        """Train all parameters, with this number of outputs."""
        self.outputs, self.train = outputs, True
        for p in self.stack.parameters.values():
            p.requires_grad_(True)

    def compute_gradients(self, fleet: Fleet, step: Step) -> None:
        """Compute losses, gradients, and gradients of plugins' functions of the outputs; once for runs that share them.

        Args:
            fleet: of the runs.
            step: gets the results.
        """
        sharing, indices = self.sharing, step.indices
        with sharing.representatives_only(self.stack):
            step.indices = sharing.select(indices)
            logits, losses, total = fleet.learner.losses(fleet, step)
            for plugin in fleet.plugins:
                if (probe := plugin.probe(fleet, logits)) is not None:
                    step.probes |= self.gradients(probe, keep=True)
            gradients = self.gradients(total.sum())
        step.gradients = {name: sharing.expand(g) for name, g in gradients.items()}
        step.indices, step.logits, step.losses = indices, *map(sharing.expand, (logits.detach(), losses.detach()))

    def losses(self, indices: Tensor, task: int | None, *, evaluate: bool = False) -> tuple[Tensor, Tensor]:
        """Return logits (runs, batch, outputs) and each run's losses of one task's head, or of each sample's own.

        Args:
            indices: of the images, int64 of shape (runs, batch).
            task: the number of the task whose head is used; None for each image's own.
            evaluate: pass through networks in evaluation mode.

        Returns:
            The logits, and the mean losses of shape (runs,).
        """
        logits, losses = self.sample_losses(indices, task, evaluate=evaluate)
        return logits, losses.mean(1)

    def sample_losses(self, indices: Tensor, task: int | None, *, evaluate: bool = False) -> tuple[Tensor, Tensor]:
        """Return what `losses` does, with the loss of each sample, of shape (runs, batch)."""
        batch = self.data.batch(indices, task)
        logits = self.stack(batch.x, batch.head, train=self.train and not evaluate)
        if self.outputs < self.data.stream.outputs:
            logits = logits[..., : self.outputs]
        losses = cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none")
        return logits, losses.view_as(indices)

    def gradients(self, loss: Tensor, *, keep: bool = False) -> Tensors:
        """Return the gradient of each trained parameter that the loss depends on; `keep` the graph for another."""
        trained = {name: p for name, p in self.stack.parameters.items() if p.requires_grad}
        gradients = torch.autograd.grad(loss, list(trained.values()), retain_graph=keep, allow_unused=True)
        return {name: g for name, g in zip(trained, gradients, strict=True) if g is not None}

    def validation_gradients(self, indices: Tensor) -> Tensors:
        """Return the gradients of each run's mean loss in evaluation mode, each sample by its own task's head."""
        return self.gradients(self.losses(indices, None, evaluate=True)[1].sum())
