"""GPM: gradients are projected away from the subspace that holds most of the energy of past inputs.

Saha, Garg, Roy: Gradient Projection Memory for Continual Learning. ICLR 2021, https://arxiv.org/abs/2103.09762.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mooring.curvature.eigenbases import eigenbasis
from mooring.rules.pull import Number, check_numbers, per_run
from mooring_lab.methods.projections.projection import InputProjection, State


@dataclass(frozen=True)
class GPM(InputProjection):
    """P = I - M M', where the columns of M span the inputs of past tasks but for a share of their energy.

    When a task ends, the part of its inputs that M does not span yet, (I - M M') R, adds its leading left singular
    vectors to M: as few as leave at most `share` of the energy |R|^2 outside. The paper's threshold is 1 - share.

    Args:
        share: the share of the energy that stays free, from 0 to 1; one number, or one per run.

    Example:
        >>> inputs = torch.diag(torch.tensor([10.0, 1.0, 0.1], dtype=torch.float64))
        >>> GPM(share=0.01).update({}, inputs @ inputs, 3)["projection"].diagonal()
        tensor([0., 1., 1.], dtype=torch.float64)
    """

    share: Number
    samples: ClassVar[int | None] = 300
    """As in the paper's experiments on permuted MNIST."""

    def __post_init__(self) -> None:
        check_numbers("share", self.share, 0, 1)

    def update(self, state: State, moment: Tensor, count: int) -> State:
        """Return the projection after a task; see `InputProjection.update`."""
        size = moment.shape[-1]
        before = state.get("projection", torch.eye(size).to(moment).expand_as(moment))
        total = moment.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True)
        values, vectors = eigenbasis(before @ moment @ before)  # ascending
        values = values.clamp(min=0)
        outside = values.cumsum(-1)  # the energy that stays free if only the vectors after this one are added
        rounding = size * torch.finfo(moment.dtype).eps * total
        added = (outside > per_run(_like(self.share, moment), total) * total) & (values > rounding)
        basis = vectors * added.unsqueeze(-2)
        return {"projection": before - basis @ basis.mT}


def _like(share: Number, moment: Tensor) -> Number:
    return share.to(moment) if isinstance(share, Tensor) else share
