"""The normalization of images."""

import torch
from torch import Tensor


def normalize_pixels(images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return (x / 255 - 0.5) / 0.5, which maps pixels from 0 to 255 to numbers from -1 to 1.

    Example:
        >>> normalize_pixels(torch.tensor([0, 255], dtype=torch.uint8))
        tensor([-1.,  1.])
    """
    return images.to(dtype).div_(127.5).sub_(1)
