"""Convolutions and pools of a whole stack of networks on a GPU, in Triton: one program does a tile of one run.

Images lie in memory as (runs, batch, height, width, channels), weights as (runs, outputs, taps, channels). A tile is
some rows, that is positions of images, by some channels.
"""

from mooring.lab.fleet.kernels.convolutions import convolve, convolve_tiles, transpose
from mooring.lab.fleet.kernels.images import gather, halve, mask, pool, unpool
from mooring.lab.fleet.kernels.weights import weigh, weigh_tiles

__all__ = [
    "convolve",
    "convolve_tiles",
    "gather",
    "halve",
    "mask",
    "pool",
    "transpose",
    "unpool",
    "weigh",
    "weigh_tiles",
]
