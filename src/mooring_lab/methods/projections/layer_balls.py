"""Balls around the anchor of a parameter: the projection into one, and gradient descent on its radius.

The norm is MARS, the largest sum of absolute values of a row. A row is everything behind the first axis of a parameter,
and each number of a vector, such as a bias, is a row.
"""

import torch
from torch import Tensor

from mooring_lab.model.adam import SECOND_BETA, adam_moments

SMALLEST_RADIUS = 1e-8
"""The radius at the start of a task, and the least that it becomes."""

FIRST_BETA = 0.9
"""Of Adam, with which the radii are learned."""


def row_norms(displacement: Tensor) -> Tensor:
    """Return the sum of absolute values of each row, (runs, rows, 1, ...), of a displacement (runs, rows, ...).

    Example:
        >>> row_norms(torch.tensor([[[1.0, -2.0], [0.0, 3.0]]])).flatten()
        tensor([3., 3.])
    """
    sizes = displacement.abs()
    return sizes if sizes.ndim < 3 else sizes.sum(tuple(range(2, sizes.ndim)), keepdim=True)


def project(displacement: Tensor, radius: Tensor) -> Tensor:
    """Return the displacement with every row that is longer than the radius shortened to it.

    Args:
        displacement: theta - anchor, (runs, rows, ...).
        radius: of each run, (runs,).

    Example:
        >>> project(torch.tensor([[[1.0, -2.0], [0.0, 0.5]]]), torch.tensor([1.5]))
        tensor([[[ 0.5000, -1.0000],
                 [ 0.0000,  0.5000]]])
    """
    norms = row_norms(displacement)
    limit = radius.reshape(-1, *(1,) * (norms.ndim - 1))
    return torch.where(norms > limit, displacement * (limit / norms), displacement)


def radius_gradient(gradient: Tensor, displacement: Tensor, radius: Tensor) -> Tensor:
    """Return the gradient of a loss with respect to the radius, of shape (runs,).

    The loss is that of anchor + project(displacement, radius); rows within the radius do not depend on it.

    Args:
        gradient: of the loss with respect to the projected parameter.
        displacement: before the projection.
        radius: of each run, (runs,).

    Example:
        >>> radius_gradient(torch.tensor([[[1.0, 1.0]]]), torch.tensor([[[3.0, 1.0]]]), torch.tensor([2.0]))
        tensor([1.])
    """
    norms = row_norms(displacement)
    outside = norms > radius.reshape(-1, *(1,) * (norms.ndim - 1))
    terms = torch.where(outside, gradient * displacement / norms, 0.0)
    return terms.reshape(len(terms), -1).sum(1)


def adam_step(state: dict[str, Tensor], gradient: Tensor, lr: float | Tensor) -> None:
    """Take one step of Adam on the radii, in place, and keep them at least as large as the smallest one.

    Args:
        state: "radius", "mean", "square" and "steps", each of shape (runs,).
        gradient: of shape (runs,).
        lr: one number, or one per run.
    """
    state["steps"].add_(1)
    corrections = (1 - beta ** state["steps"] for beta in (FIRST_BETA, SECOND_BETA))
    mean, spread = adam_moments(state["mean"], state["square"], gradient, FIRST_BETA, *corrections)
    state["radius"].sub_(lr * mean / spread).clamp_(min=SMALLEST_RADIUS)
