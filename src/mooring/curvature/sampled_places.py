"""Samples of the places of a layer, pixels of an image or positions of a sequence, for its Kronecker factors."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.grad import conv2d_weight

from mooring.curvature.kronecker_factors import layer_rows

MAX_WINDOWS = 1 << 26
"""Numbers in the copies of windows of a convolution that are made at once."""


def sample_rows(layer: nn.Module, a: Tensor, b: Tensor, places: int | None) -> tuple[Tensor, Tensor, float]:
    """Return `layer_rows` of at most `places` places per sample, and the ratio of all places to those.

    Places lie on a regular grid. Its first point is in the middle of a cell, so that borders do not count too much.

    Args:
        layer: a linear layer or a convolution.
        a: its inputs, (n, ..., in) or (n, channels, height, width).
        b: the gradient of its outputs.
        places: the largest number of places of a sample.

    Example:
        >>> a, b, share = sample_rows(nn.Conv2d(3, 8, 2), torch.zeros(5, 3, 9, 9), torch.zeros(5, 8, 8, 8), 16)
        >>> tuple(a.shape), tuple(b.shape), share
        ((5, 16, 12), (5, 16, 8), 4.0)
    """
    total = b.shape[2:].numel() if isinstance(layer, nn.Conv2d) else b.shape[1:-1].numel()
    if places is None or total <= places:
        return *layer_rows(layer, a, b), 1.0
    if isinstance(layer, nn.Conv2d):
        every = math.ceil(math.sqrt(total / places))
        a, b, layer = _sample_image(layer, a, b, every)
    else:
        every = math.ceil(total / places)
        a, b = (t.flatten(1, -2)[:, every // 2 :: every] for t in (a, b))
    a, b = layer_rows(layer, a, b)
    return a, b, total / a.shape[1]


def samples_at_once(layer: nn.Module, a: Tensor, b: Tensor, places: int | None) -> int:
    """Return how many samples of a batch to take at once, so that the windows of a convolution fit into MAX_WINDOWS.

    Example:
        >>> samples_at_once(nn.Conv2d(64, 8, 3), torch.zeros(256, 64, 1, 1), torch.zeros(256, 8, 56, 56), None)
        37
    """
    if not isinstance(layer, nn.Conv2d) or layer.kernel_size == (1, 1):
        return len(a)
    total = b.shape[2:].numel()
    windows = layer.in_channels * layer.kernel_size[0] * layer.kernel_size[1] * min(total, places or total)
    return max(1, MAX_WINDOWS // windows)


def _sample_image(layer: nn.Conv2d, a: Tensor, b: Tensor, every: int) -> tuple[Tensor, Tensor, nn.Conv2d]:
    """Return the inputs and output gradients of each `every`-th row and column, and the convolution between them."""
    first = min(every // 2, b.shape[-2] - 1), min(every // 2, b.shape[-1] - 1)
    assert not isinstance(layer.padding, str)  # such layers have no factors
    (rows, columns), (top, left) = layer.stride, layer.padding
    a = functional.pad(a, (left, left, top, top))[:, :, first[0] * rows :, first[1] * columns :]
    stride, device = (every * rows, every * columns), torch.device("meta")
    wider = nn.Conv2d(
        layer.in_channels,
        layer.out_channels,
        layer.kernel_size,  # type: ignore[arg-type]
        stride,
        dilation=layer.dilation,  # type: ignore[arg-type]
        groups=layer.groups,
        device=device,
    )
    return a, b[:, :, first[0] :: every, first[1] :: every], wider


def gradient_along(layer: nn.Module, a: Tensor, b: Tensor, fixed: Tensor) -> Tensor:
    """Return the gradient of a weight, from all places, along fixed directions of its inputs, (out, directions).

    That of a convolution is computed as a backward pass does it, without a copy of each place's window.

    Args:
        layer: a linear layer or a convolution.
        a: its inputs.
        b: the gradient of its outputs.
        fixed: the directions, (inputs of a group, directions).

    Example:
        >>> gradient_along(nn.Conv2d(3, 8, 2), torch.ones(5, 3, 4, 4), torch.ones(5, 8, 3, 3), torch.ones(12, 2)).shape
        torch.Size([8, 2])
    """
    if isinstance(layer, nn.Conv2d):
        shape = layer.out_channels, layer.in_channels // layer.groups, *layer.kernel_size
        window = layer.stride, layer.padding, layer.dilation, layer.groups
        gradient: Tensor = conv2d_weight(a, shape, b.to(a.dtype), *window)  # type: ignore[no-untyped-call]
        return gradient.flatten(1).to(fixed.dtype) @ fixed
    along = a.flatten(0, -2).to(fixed.dtype) @ fixed
    return b.flatten(0, -2).to(fixed.dtype).mT @ along
