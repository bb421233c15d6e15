"""Triton kernels for the convolutions, pools and batch norms of a whole stack; one program computes a tile of one run.

In memory, images are (runs, batch, height, width, channels) and weights (runs, outputs, taps, channels). The rows of a
tile are positions of images, its columns are channels.
"""

from mooring_lab.fleet.gpu.kernels.convolution_kernels import convolve, convolve_tiles, transpose_weights
from mooring_lab.fleet.gpu.kernels.image_kernels import (
    gather_images,
    mask_gradient,
    max_pool,
    max_pool_gradient,
    pad_channels,
    to_float16,
)
from mooring_lab.fleet.gpu.kernels.norm_kernels import (
    batch_statistics,
    norm_gradient,
    norm_gradient_sums,
    normalize,
    shifted_moments,
)
from mooring_lab.fleet.gpu.kernels.weight_kernels import convolution_weight_gradient, convolution_weight_gradient_tiles

__all__ = [
    "batch_statistics",
    "convolution_weight_gradient",
    "convolution_weight_gradient_tiles",
    "convolve",
    "convolve_tiles",
    "gather_images",
    "mask_gradient",
    "max_pool",
    "max_pool_gradient",
    "norm_gradient",
    "norm_gradient_sums",
    "normalize",
    "pad_channels",
    "shifted_moments",
    "to_float16",
    "transpose_weights",
]
