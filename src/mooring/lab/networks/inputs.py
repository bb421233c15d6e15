"""From stored pixels to what a network sees."""

import torch
from torch import Tensor

__all__ = ["scaled"]


def scaled(images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """(x / 255 - 0.5) / 0.5: pixels from 0 to 255 become numbers from -1 to 1.

    Example:
        >>> scaled(torch.tensor([0, 255], dtype=torch.uint8))
        tensor([-1.,  1.])
    """
    return images.to(dtype).div_(127.5).sub_(1)
