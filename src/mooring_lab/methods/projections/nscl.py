"""NSCL: gradients are projected into the approximate null space of the uncentred covariance of past inputs.

Wang, Li, Sun, Xu: Training Networks in Null Space of Feature Covariance for Continual Learning. CVPR 2021,
https://arxiv.org/abs/2103.07113. Their Adam-NSCL projects the steps of Adam; the
laboratory projects the gradient before the optimizer's step.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mooring.curvature.eigenbases import eigenbasis
from mooring.rules.pull import Number, check_numbers, per_run
from mooring_lab.methods.projections.projection import InputProjection, State


@dataclass(frozen=True)
class NSCL(InputProjection):
    """P = V V', where V has the eigenvectors of the covariance with eigenvalues of at most `ratio` times the smallest.

    The covariance is that of all inputs of all past tasks, not centred. The smallest eigenvalue is the smallest one
    above rounding error; directions below it, such as pixels that are always 0, are in the null space at any ratio.

    Args:
        ratio: the paper's a, at least 0; one number, or one per run.

    Example:
        >>> moment = torch.diag(torch.tensor([0.0, 1.0, 5.0, 100.0], dtype=torch.float64))
        >>> NSCL(ratio=10).update({}, moment, 1)["projection"].diagonal()
        tensor([1., 1., 1., 0.], dtype=torch.float64)
    """

    ratio: Number

    def __post_init__(self) -> None:
        check_numbers("ratio", self.ratio, 0)

    def update(self, state: State, moment: Tensor, count: int) -> State:
        """Return covariance and projection after a task; see `InputProjection.update`."""
        total = moment + state["moment"] if state else moment
        values, vectors = eigenbasis(total)
        rounding = total.shape[-1] * torch.finfo(total.dtype).eps * values[..., -1:]
        smallest = torch.where(values > rounding, values, torch.inf).amin(-1, keepdim=True)
        ratio = self.ratio.to(total) if isinstance(self.ratio, Tensor) else self.ratio
        null = (values <= rounding) | (values <= per_run(ratio, values) * smallest)
        basis = vectors * null.unsqueeze(-2)
        return {"moment": total, "projection": basis @ basis.mT}
