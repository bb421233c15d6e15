"""Convolutions, pools and batch norms of a whole stack of networks, in Triton: one program does a tile of one run.

Images lie in memory as (runs, batch, height, width, channels), weights as (runs, outputs, taps, channels). A tile is
some rows, that is positions of images, by some channels.
"""

from mooring.lab.fleet.gpu.kernels.convolution_kernels import convolve, convolve_tiles, transpose
from mooring.lab.fleet.gpu.kernels.image_kernels import gather, halve, mask, pool, unpool, widen
from mooring.lab.fleet.gpu.kernels.norm_kernels import moments, norm_gradient, norm_sums, normalise, settle
from mooring.lab.fleet.gpu.kernels.weight_kernels import weigh, weigh_tiles

__all__ = [
    "convolve",
    "convolve_tiles",
    "gather",
    "halve",
    "mask",
    "moments",
    "norm_gradient",
    "norm_sums",
    "normalise",
    "pool",
    "settle",
    "transpose",
    "unpool",
    "weigh",
    "weigh_tiles",
    "widen",
]
