"""In what tiles a convolution is computed: what was fastest of those tried on an H200, for each shape."""

from dataclasses import dataclass

import torch

__all__ = ["BUSY", "Geometry", "aligned", "blocks", "box", "boxes", "next_power", "weight_blocks", "weight_boxes"]


BUSY = 264
"""So many programs keep a large GPU busy: two for each of its processors."""


@dataclass(frozen=True)
class Geometry:
    """A convolution of every run.

    Attributes:
        runs, outputs, channels, kh, kw: the shape of the stacked weights.
        stride, padding: of both dimensions.
    """

    runs: int
    outputs: int
    channels: int
    kh: int
    kw: int
    stride: int
    padding: int

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Of the output.

        Example:
            >>> Geometry(2, 8, 3, 3, 3, stride=2, padding=1).size(32, 32)
            (16, 16)
        """
        high = (height + 2 * self.padding - self.kh) // self.stride + 1
        return high, (width + 2 * self.padding - self.kw) // self.stride + 1

    def boxed(self, height: int, width: int, *channels: int) -> bool:
        """Whether boxes of whole image rows tile the images: the kernels for that are faster.

        Args:
            height: of an image.
            width: of an image.
            channels: those that tensors have which are read in boxes.
        """
        same = self.stride == 1 and self.kh == self.kw == 2 * self.padding + 1
        even = all(next_power(side) == side for side in (height, width)) and width <= 64
        fits = all(each == aligned(each) for each in channels)
        return same and even and fits and torch.cuda.get_device_capability()[0] in (9, 10)


def next_power(value: int) -> int:
    """The first power of two that is not below it.

    Example:
        >>> next_power(21), next_power(64)
        (32, 64)
    """
    return 1 << (value - 1).bit_length()


def aligned(channels: int) -> int:
    """The first number of channels, not below it, that memory is read in by sixteen bytes at a time.

    Example:
        >>> aligned(21), aligned(64)
        (24, 64)
    """
    return -(-channels // 8) * 8


def boxes(rows: int, outputs: int, channels: int, runs: int, dtype: torch.dtype) -> tuple[int, int, int, int, int]:
    """Rows, outputs and summed channels of a tile, warps and stages; smaller tiles where large ones leave the GPU idle.

    Example:
        >>> boxes(10240, 64, 64, 128, torch.float32), boxes(640, 256, 256, 5, torch.float32)
        ((256, 64, 32, 8, 3), (64, 64, 32, 4, 4))
    """
    narrow = max(16, min(64, next_power(outputs)))
    deep = min(32 if dtype == torch.float32 else 64, max(16, next_power(channels)))  # at most 128 bytes
    large = (128, 128, deep, 8, 4 if dtype == torch.float32 else 3) if outputs > 64 else (256, narrow, deep, 8, 3)
    for tile in (large, (128, narrow, deep, 4, 4)):
        if -(-rows // tile[0]) * -(-outputs // tile[1]) * runs >= BUSY:
            return tile
    return 64, narrow, deep, 4, 4


def blocks(outputs: int, channels: int, dtype: torch.dtype) -> tuple[int, int, int, int, int]:
    """The same for images that do not fit into boxes."""
    narrow = max(16, min(128, next_power(outputs)))
    deep = min(32 if dtype == torch.float32 else 64, max(16, next_power(channels)))
    return 128, narrow, deep, 4 if narrow <= 64 else 8, 3


def weight_boxes(outputs: int, channels: int, kw: int) -> tuple[int, int, int, int, int, bool]:
    """Outputs, channels and summed rows of a tile of a weight gradient, warps, stages; whether three taps at once."""
    narrow = max(16, min(64, next_power(channels)))
    if outputs <= 64:
        return 64, narrow, 128, 4, 3, kw == 3
    if channels % 128:
        return 128, narrow, 64, 4, 4, kw == 3
    return (128, 128, 64, 8, 3, True) if kw == 3 else (128, 128, 64, 4, 4, False)


def weight_blocks(outputs: int, channels: int, taps: int) -> tuple[int, int, int, int, int, bool]:
    """The same for images that do not fit into boxes."""
    wide = 64 if outputs <= 64 or channels <= 64 else 128
    bn = 64 if outputs <= 64 else 128
    flat = channels * taps <= 64
    bc = max(16, next_power(channels * taps if flat else min(channels, wide)))
    return bn, bc, 64, 8 if bn == bc == 128 else 4, 3, False


def box(rows: int, height: int, width: int) -> tuple[int, int, int]:
    """Images, image rows and columns that make up so many rows.

    Example:
        >>> box(128, 8, 8), box(128, 32, 32)
        ((2, 8, 8), (1, 4, 32))
    """
    high = min(height, rows // width)
    return rows // (width * high), high, width
