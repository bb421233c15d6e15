"""Tile sizes of the convolution kernels: for each shape the fastest of those tried on an H200."""

from dataclasses import dataclass

import torch

MIN_PROGRAMS = 264
"""Number of programs that keep a large GPU busy: two for each of its multiprocessors."""


@dataclass(frozen=True)
class ConvolutionGeometry:
    """The shape of a convolution of every run.

    Attributes:
        runs, outputs, channels, kh, kw: the shape of the stacked weights.
        stride, padding: the same in both dimensions.
    """

    runs: int
    outputs: int
    channels: int
    kh: int
    kw: int
    stride: int
    padding: int

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        """Return height and width of the output.

        Example:
            >>> ConvolutionGeometry(2, 8, 3, 3, 3, stride=2, padding=1).output_size(32, 32)
            (16, 16)
        """
        high = (height + 2 * self.padding - self.kh) // self.stride + 1
        return high, (width + 2 * self.padding - self.kw) // self.stride + 1

    def fits_boxes(self, height: int, width: int, *channels: int) -> bool:
        """Return whether boxes of whole image rows tile the images: the kernels for boxes are faster.

        Args:
            height: of an image.
            width: of an image.
            channels: the numbers of channels of the tensors that are read in boxes.
        """
        same_size = self.stride == 1 and self.kh == self.kw == 2 * self.padding + 1
        even = all(next_power_of_two(side) == side for side in (height, width)) and width <= 64
        aligned = all(count == align_channels(count) for count in channels)
        return same_size and even and aligned and torch.cuda.get_device_capability()[0] in (9, 10)


def next_power_of_two(value: int) -> int:
    """Return the smallest power of two that is at least the value.

    Example:
        >>> next_power_of_two(21), next_power_of_two(64)
        (32, 64)
    """
    return 1 << (value - 1).bit_length()


def align_channels(channels: int) -> int:
    """Return the smallest number of channels, at least this one, that fills whole memory reads of sixteen bytes.

    Example:
        >>> align_channels(21), align_channels(64)
        (24, 64)
    """
    return -(-channels // 8) * 8


def box_tile(rows: int, outputs: int, channels: int, runs: int, dtype: torch.dtype) -> tuple[int, int, int, int, int]:
    """Return rows, outputs and summed channels of a tile, warps and stages, for images that fit into boxes.

    Tiles are smaller if large ones would leave the GPU idle.

    Example:
        >>> box_tile(10240, 64, 64, 128, torch.float32), box_tile(640, 256, 256, 5, torch.float32)
        ((256, 64, 32, 8, 3), (64, 64, 32, 4, 4))
    """
    narrow = max(16, min(64, next_power_of_two(outputs)))
    deep = min(32 if dtype == torch.float32 else 64, max(16, next_power_of_two(channels)))  # at most 128 bytes
    large = (128, 128, deep, 8, 4 if dtype == torch.float32 else 3) if outputs > 64 else (256, narrow, deep, 8, 3)
    for tile in (large, (128, narrow, deep, 4, 4)):
        if -(-rows // tile[0]) * -(-outputs // tile[1]) * runs >= MIN_PROGRAMS:
            return tile
    return 64, narrow, deep, 4, 4


def block_tile(outputs: int, channels: int, dtype: torch.dtype) -> tuple[int, int, int, int, int]:
    """Return the same as `box_tile`, for images that do not fit into boxes."""
    narrow = max(16, min(128, next_power_of_two(outputs)))
    deep = min(32 if dtype == torch.float32 else 64, max(16, next_power_of_two(channels)))
    return 128, narrow, deep, 4 if narrow <= 64 else 8, 3


def weight_box_tile(outputs: int, channels: int, kw: int) -> tuple[int, int, int, int, int, bool]:
    """Return outputs, channels and summed rows of a tile, warps, stages, and whether three taps are computed at once.

    It is for weight gradients of images that fit into boxes.
    """
    narrow = max(16, min(64, next_power_of_two(channels)))
    if outputs <= 64:
        return 64, narrow, 128, 4, 3, kw == 3
    if channels % 128:
        return 128, narrow, 64, 4, 4, kw == 3
    return (128, 128, 64, 8, 3, True) if kw == 3 else (128, 128, 64, 4, 4, False)


def weight_block_tile(outputs: int, channels: int, taps: int) -> tuple[int, int, int, int, int, bool]:
    """Return the same as `weight_box_tile`, for images that do not fit into boxes."""
    wide = 64 if outputs <= 64 or channels <= 64 else 128
    bn = 64 if outputs <= 64 else 128
    flat = channels * taps <= 64
    bc = max(16, next_power_of_two(channels * taps if flat else min(channels, wide)))
    return bn, bc, 64, 8 if bn == bc == 128 else 4, 3, False


def box_shape(rows: int, height: int, width: int) -> tuple[int, int, int]:
    """Return images, image rows and columns of a box with this many positions.

    Example:
        >>> box_shape(128, 8, 8), box_shape(128, 32, 32)
        ((2, 8, 8), (1, 4, 32))
    """
    high = min(height, rows // width)
    return rows // (width * high), high, width
