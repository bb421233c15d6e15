"""Options with one value per run, broadcast over a leading run axis."""

from torch import Tensor

__all__ = ["Number", "per_run"]

Number = float | Tensor
"""A learning rate or a strength: one number, or a vector with one per run."""


def per_run(value: Number, like: Tensor) -> Number:
    """Reshape a vector of per-run numbers so that it broadcasts over the leading run axis of `like`.

    Args:
        value: a number, a 0-d tensor, or a vector of shape (runs,).
        like: the tensor to broadcast with, of shape (runs, ...) if `value` is a vector.

    Returns:
        `value` unchanged, or reshaped to (runs, 1, ..., 1).

    Example:
        >>> import torch
        >>> per_run(torch.tensor([0.1, 0.2]), torch.zeros(2, 3, 5)).shape
        torch.Size([2, 1, 1])
    """
    if isinstance(value, Tensor) and value.ndim == 1:
        return value.reshape(-1, *(1,) * (like.ndim - 1))
    return value
