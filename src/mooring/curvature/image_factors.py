"""The factors of a convolution from images as they lie in memory, channels first.

The rows of `kronecker_factors.layer_rows` have channels last, so they are a transposed copy of the image, or of its
unfolded windows. Products of each sample need no such copy. In a convolution with many groups, whose products are
small, they also use the whole GPU.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import unfold

from mooring.curvature.kronecker_factors import float32_product, sums_in_float32


def has_channels_first(layer: nn.Module, a: Tensor, b: Tensor) -> bool:
    """Return whether a layer is a convolution whose inputs and output gradients lie in memory channels first.

    Example:
        >>> images = torch.zeros(2, 4, 5, 5)
        >>> last = images.to(memory_format=torch.channels_last)
        >>> has_channels_first(nn.Conv2d(4, 4, 1), images, images), has_channels_first(nn.Conv2d(4, 4, 1), last, last)
        (True, False)
    """
    return isinstance(layer, nn.Conv2d) and a.is_contiguous() and b.is_contiguous()


def image_windows(layer: nn.Conv2d, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the inputs and the output gradients of each place, (n, groups, features, places), in one dtype.

    Example:
        >>> layer = nn.Conv2d(4, 8, 3, groups=2)
        >>> [tuple(t.shape) for t in image_windows(layer, torch.zeros(5, 4, 6, 6), torch.zeros(5, 8, 4, 4))]
        [(5, 2, 18, 16), (5, 2, 4, 16)]
    """
    if a.dtype != b.dtype or not sums_in_float32(a):
        dtype = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
        a, b = a.to(dtype), b.to(dtype)
    window: Any = (layer.kernel_size, layer.dilation, layer.padding, layer.stride)
    if layer.kernel_size == (1, 1) and layer.padding == (0, 0):
        rows, columns = layer.stride
        a = a[:, :, ::rows, ::columns].flatten(2)
    else:
        a = unfold(a, *window)
    places = b.shape[2:].numel()
    a, b = (t.reshape(len(t), layer.groups, -1, places) for t in (a, b))
    return a, b


def window_products(x: Tensor, y: Tensor) -> Tensor:
    """Return the sum of x y' over samples and places, (groups, f, h), of x (n, groups, f, t) and y (n, groups, h, t).

    Each sample has a product of its own, unless these would take more memory than x and y.

    Example:
        >>> window_products(torch.ones(5, 2, 3, 4), torch.ones(5, 2, 1, 4))[0].tolist()
        [[20.0], [20.0], [20.0]]
    """
    n, groups, f, t = x.shape
    h = y.shape[2]
    if f == h == 1:
        return (x * y).sum((0, 3), dtype=torch.promote_types(x.dtype, torch.float32)).unsqueeze(-1)
    if f * h <= (f + h) * t:
        return float32_product(x.reshape(n * groups, f, t), y.reshape(n * groups, h, t).mT).view(n, groups, f, h).sum(0)
    columns = [t.permute(1, 2, 0, 3).reshape(groups, t.shape[2], -1) for t in (x, y)]
    return float32_product(columns[0], columns[1].mT)


def gradient_of_windows(windows: Tensor, outputs: Tensor, fixed: Tensor) -> Tensor:
    """Return the gradient of a weight along fixed directions of its inputs, (out, directions).

    Args:
        windows: the inputs of each place, as `image_windows` returns them.
        outputs: the output gradients likewise.
        fixed: the directions, (features, directions).

    Example:
        >>> windows, outputs = torch.ones(5, 2, 3, 4), torch.ones(5, 2, 1, 4)
        >>> gradient_of_windows(windows, outputs, torch.ones(3, 8)).shape
        torch.Size([2, 8])
    """
    if windows.shape[2] > fixed.shape[1] and windows.shape[1] == 1:
        n, _, f, t = windows.shape
        along = float32_product(fixed.mT.to(windows.dtype).expand(n, -1, -1), windows.reshape(n, f, t))
        return window_products(outputs, along.to(outputs.dtype).unsqueeze(1)).flatten(0, 1)
    gradient = window_products(outputs, windows)  # whole, because it takes no more
    return (gradient @ fixed.to(gradient.dtype)).flatten(0, 1)
