"""How the runs of a fleet keep their budgets, each its own; on a GPU in two kernels that nothing waits for."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mooring.backends.kernels.launch import launch
from mooring.importance.kronecker_factors import Factor
from mooring.lab.fleet.gpu.convolution import has_kernels
from mooring.pulls.budget import Budget, spent_at

try:
    import triton

    from mooring.lab.fleet.gpu.kernels import budget_kernel as kernels
except ImportError:  # no GPU compiler here
    triton = None

__all__ = ["KroneckerTerm", "Line", "pull_back", "spent"]

BLOCK = 1024


@dataclass
class Line:
    """What holds one parameter of every run.

    Attributes:
        theta: the parameter, of shape (runs, elements); changed in place.
        anchor: of the same shape.
        previous: the curvature over past tasks, of the same shape or (runs, 1).
    """

    theta: Tensor
    anchor: Tensor
    previous: Tensor

    @property
    def blocks(self) -> int:
        """How many pieces a kernel cuts a run's elements into."""
        return -(-self.theta.shape[1] // BLOCK)


class KroneckerTerm(Line):
    """The same in the basis of a layer's Kronecker factors.

    Args:
        theta: the parameter, of shape (runs, ...); changed in place.
        anchor: of the same shape.
        factor: its curvature.
    """

    def __init__(self, theta: Tensor, anchor: Tensor, factor: Factor) -> None:
        assert factor.basis is not None
        turned = factor.turned(theta - anchor)
        super().__init__(turned.flatten(1), torch.zeros_like(turned).flatten(1), factor.basis[2].flatten(1))
        self.parameter, self.factor, self.before = theta, factor, turned.clone()

    def put_back(self) -> None:
        """What the pull took away in the basis is taken from the parameter."""
        taken = self.before - self.theta.view_as(self.before)
        self.parameter.sub_(self.factor.turned_back(taken, self.parameter))


def spent(lines: Sequence[Line], mu: Tensor, done: Tensor) -> Tensor:
    """`spent_at` over all parameters of each run, of shape (2, runs); anything for runs that are done.

    Example:
        >>> line = Line(torch.full((1, 1), 3.0), torch.zeros(1, 1), torch.full((1, 1), 2.0))
        >>> spent([line], torch.ones(1), torch.zeros(1, dtype=torch.bool)).flatten()
        tensor([1.0000, 1.3333], dtype=torch.float64)
    """
    if not has_kernels(mu.device):
        return torch.stack([spent_at(line.previous, line.theta - line.anchor, mu) for line in lines]).sum(0)
    blocks, first = sum(line.blocks for line in lines), 0
    out = torch.zeros(len(mu), blocks, 2, dtype=lines[0].theta.dtype, device=mu.device)
    for line in lines:
        told = line.theta, line.anchor, line.previous.expand_as(line.theta).contiguous(), mu, done, out
        grid = (line.blocks, len(mu))
        launch(kernels.spent, grid, *told, line.theta.shape[1], blocks, first, B=BLOCK)
        first += line.blocks
    return out.sum(1, dtype=torch.float64).T


def pull_back(budget: Budget, lines: Sequence[Line], mu: Tensor) -> None:
    """theta <- anchor + d / (1 + mu * F), for every parameter of each run.

    Example:
        >>> line = Line(torch.full((1, 1), 3.0), torch.zeros(1, 1), torch.full((1, 1), 2.0))
        >>> pull_back(Budget(1.0), [line], torch.ones(1))
        >>> round(float(line.theta), 4)
        1.0
    """
    for line in lines:
        if has_kernels(mu.device):
            told = line.theta, line.anchor, line.previous.expand_as(line.theta).contiguous(), mu
            launch(kernels.pull_back, (line.blocks, len(mu)), *told, line.theta.shape[1], B=BLOCK)
        else:
            line.theta.lerp_(line.anchor, budget.rate(line.previous, mu.to(line.theta.dtype)))
        if isinstance(line, KroneckerTerm):
            line.put_back()
