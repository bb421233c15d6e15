"""A linear layer of a whole stack of networks, and its gradients."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


class BatchedLinear(torch.autograd.Function):
    """x W' + b for each run, with gradients in the memory layout of the weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute x W' + b: x of shape (runs, batch, inputs), weight (runs, outputs, inputs), bias (runs, outputs)."""
        ctx.save_for_backward(x, weight)
        return torch.bmm(x, weight.mT) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, weight.mT)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Compute g W, g' x, and g summed over the batch."""
        x, weight = ctx.saved_tensors
        needed = ctx.needs_input_grad
        return (
            torch.bmm(g, weight) if needed[0] else None,
            torch.bmm(g.mT, x) if needed[1] else None,
            g.sum(1) if needed[2] else None,
        )


def linear(layer: nn.Module, x: Tensor, tensors: Mapping[str, Tensor], runs: int) -> Tensor:
    """Apply the linear layer of every run; x of shape (runs * batch, ..., inputs)."""
    return batched_linear(x, tensors["weight"], tensors.get("bias"))


def batched_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute x W' + b for each run, in x's dtype.

    Args:
        x: of shape (runs * batch, ..., inputs).
        weight: of shape (runs, outputs, inputs).
        bias: of shape (runs, outputs).

    Example:
        >>> batched_linear(torch.ones(2 * 5, 4, 3), torch.ones(2, 7, 3), None).shape
        torch.Size([10, 4, 7])
    """
    rows = x.reshape(weight.shape[0], -1, x.shape[-1])
    bias = None if bias is None else bias.to(x.dtype)
    out: Tensor = BatchedLinear.apply(rows, weight.to(x.dtype), bias)  # type: ignore[no-untyped-call]
    return out.reshape(*x.shape[:-1], out.shape[-1])
