"""A-GEM: the gradient is projected so that the loss on samples of past tasks does not rise.

A. Chaudhry, M. Ranzato, M. Rohrbach, M. Elhoseiny: Efficient lifelong learning with A-GEM, ICLR 2019.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mooring_lab.fleet.learner_plugin import Step
from mooring_lab.fleet.replay_memory import ReplayMemory

if TYPE_CHECKING:
    from mooring_lab.fleet.fleet import Fleet


class AGEM(ReplayMemory):
    """Gradients that do not point against those of samples of past tasks."""

    def gradients(self, fleet: Fleet, step: Step) -> None:
        """Project the task's gradients."""
        if step.replayed is not None:
            loss = fleet.passes.losses(step.replayed, None)[1]
            step.gradients = project_agem(step.gradients, fleet.passes.gradients(loss.sum()))


def project_agem(gradients: dict[str, Tensor], reference: dict[str, Tensor]) -> dict[str, Tensor]:
    """Project gradients as A-GEM does: g <- g - (g . r / r . r) * r where g . r < 0.

    The products are taken over all parameters of a run.

    Args:
        gradients: g, of the task's loss, by parameter name, each of shape (runs, ...).
        reference: r, of the loss on replayed samples. A parameter that is missing in one of the two counts as 0 there.

    Example:
        >>> g, r = torch.tensor([[1.0, -1.0], [1.0, 1.0]]), torch.tensor([[0.0, 2.0], [0.0, 2.0]])
        >>> project_agem({"theta": g}, {"theta": r})["theta"]
        tensor([[1., 0.],
                [1., 1.]])
    """
    shapes = {name: tensor.shape for name, tensor in {**gradients, **reference}.items()}
    g, r = _row(gradients, shapes), _row(reference, shapes)
    dot, norm = (g * r).sum(1), r.square().sum(1)
    scale = torch.where(dot < 0, -dot / norm, 0.0)
    parts = torch.split(g + scale.unsqueeze(1) * r, [shape[1:].numel() for shape in shapes.values()], 1)
    return {name: part.view(shape) for part, (name, shape) in zip(parts, shapes.items(), strict=True)}


def _row(tensors: dict[str, Tensor], shapes: dict[str, torch.Size]) -> Tensor:
    """Concatenate the tensors of each run, with 0 for missing ones; of shape (runs, elements)."""
    like = next(iter(tensors.values()))
    complete = (tensors[name] if name in tensors else like.new_zeros(shape) for name, shape in shapes.items())
    return torch.cat([tensor.reshape(len(like), -1) for tensor in complete], 1)
