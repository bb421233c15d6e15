"""The online Laplace penalty with Kronecker factors: the force of a quadratic penalty on a whole layer.

H. Ritter, A. Botev, D. Barber: Online structured Laplace approximations for overcoming catastrophic forgetting,
NeurIPS 2018. The posterior of past tasks is a Gaussian around the anchor. The precision of a layer is G (x) A, from
factors that are summed over tasks: G is the sum of the tasks' G and A the mean of their A, so that two equal tasks
weigh twice as much as one. A bias has factors of its own, and parameters of other layers have the diagonal.
"""

from dataclasses import dataclass

from torch import Tensor

from mooring.backends.eager import apply_penalty
from mooring.curvature.kronecker_factors import KroneckerFactors
from mooring.rules import Penalty
from mooring.rules.pull import Number


@dataclass(frozen=True)
class LayerPenalty(Penalty):
    """A penalty that also holds parameters whose curvature has Kronecker factors: g <- g + strength * G d A.

    In the eigenbasis of the factors the curvature is diagonal, and the force is that of the elementwise penalty. So a
    clamped penalty caps eigenvalues.

    Example:
        >>> import torch
        >>> factors = KroneckerFactors.zeros(torch.zeros(1, 1, 2), torch.float64, runs=True)
        >>> factors.past_inputs = torch.tensor([[[2.0, 1.0], [1.0, 2.0]]]).double()
        >>> factors.past_outputs, factors.tasks = torch.tensor([[[3.0]]]).double(), 1
        >>> factors.update_eigenbasis()
        >>> LayerPenalty(10.0).layer_force(factors, torch.tensor([[[1.0, 0.0]]]).double(), 0.1).round(decimals=6)
        tensor([[[60., 30.]]], dtype=torch.float64)
    """

    def layer_force(self, factors: KroneckerFactors, d: Tensor, lr: Number) -> Tensor:
        """Return the force on a parameter.

        Args:
            factors: of past tasks, with an eigenbasis.
            d: the displacement of the parameter from its anchor, of shape (runs, out, ...).
            lr: the learning rate, one number or one per run.
        """
        assert factors.basis is not None
        in_basis, zero = factors.to_basis(d), d.new_zeros(())
        tensors = {"theta": in_basis, "anchor": zero, "previous": factors.basis[2], "g": zero, "lr": lr}
        return factors.from_basis(apply_penalty(self, tensors), d)
