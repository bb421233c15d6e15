"""A multilayer perceptron for small images."""

import math

from torch import nn

__all__ = ["mlp"]


def mlp(shape: tuple[int, int, int], width: int = 100) -> nn.Module:
    """Return a backbone of two linear layers with ReLU.

    Example:
        >>> sum(p.numel() for p in mlp((1, 8, 8)).parameters())
        16600
    """
    return nn.Sequential(
        nn.Flatten(), nn.Linear(math.prod(shape), width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
    )
