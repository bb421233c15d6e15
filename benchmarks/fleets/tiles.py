"""Time each convolution of a network in other tiles than those of `mooring.lab.fleet.gpu.conv_tiles`."""

import argparse
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fleets.output import add_common, keep, say, where
from mooring.backends.kernels.launch import dry_run
from mooring.errors import MooringError
from mooring.lab.fleet.gpu import convolution
from mooring.lab.fleet.gpu.conv_tiles import ConvolutionGeometry, align_channels, next_power_of_two
from mooring.lab.model.precision import product_dtype, tf32_mode
from mooring.lab.networks import BACKBONES

__all__ = ["add_options", "run"]

SHARED = 225_000
"""Bytes of tiles in flight that a processor has room for."""

Tile = tuple[int | bool, ...]


def add_options(parser: argparse.ArgumentParser) -> None:
    add_common(parser, cuda="bf16")
    parser.add_argument("--network", default="cnn6")
    parser.add_argument("--runs", type=int, default=16)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=10)


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every candidate for every shape and direction; the fastest, beside the one that is used."""
    if not convolution.has_kernels(options.device):
        raise MooringError("tiles are of kernels on a GPU: give --device cuda")
    told: list[dict[str, Any]] = []
    for dtype in options.dtype:
        say(
            options,
            f"{options.runs} runs of {options.network}, batch {options.batch}, {dtype}, {where(options.device)}",
        )
        say(options, f"{'in':>4s}{'out':>5s}{'side':>5s}  {'what':9s}{'used':>10s}{'fastest':>10s}  in tiles")
        for geometry, side in _convolutions(options.network, options.runs):
            with tf32_mode(dtype):
                found = _tried(geometry, side, options.batch, product_dtype(dtype) or torch.float32, options.repeats)
            for what, (used, times) in found.items():
                best = min(times, key=lambda tile: times[tile])
                shape = f"{geometry.channels:4d}{geometry.outputs:5d}{side:5d}  {what:9s}"
                say(options, f"{shape}{used:7.0f} us{times[best]:7.0f} us  {best}")
                every = {str(tile): time for tile, time in sorted(times.items(), key=lambda each: each[1])}
                told.append({"shape": str(geometry), "side": side, "what": what, "used_us": used, "tiles_us": every})
        keep(options, told)
    return told


def _convolutions(network: str, runs: int) -> list[tuple[ConvolutionGeometry, int]]:
    """Each shape once, and the side of its images; without the first, which is one product of its own."""
    found: dict[tuple[ConvolutionGeometry, int], None] = {}

    def look(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(layer, nn.Conv2d)
        shape = (layer.out_channels, layer.in_channels, *layer.kernel_size)
        found[ConvolutionGeometry(runs, *shape, layer.stride[0], int(layer.padding[0])), inputs[0].shape[2]] = None

    model = BACKBONES[network]((3, 32, 32))
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            layer.register_forward_pre_hook(look)
    model(torch.zeros(2, 3, 32, 32))
    return list(found)[1:]


def _tried(
    geometry: ConvolutionGeometry, side: int, batch: int, dtype: torch.dtype, repeats: int
) -> dict[str, tuple[float, dict[Tile, float]]]:
    """Microseconds in the tiles that are used and in each of the others, by direction."""
    runs, count = geometry.runs, geometry.kh * geometry.kw
    inputs, outputs = align_channels(geometry.channels), align_channels(geometry.outputs)
    high, wide = geometry.output_size(side, side)
    make = {"device": "cuda", "dtype": dtype}
    x = torch.randn(runs * batch, side, side, inputs, **make)
    g = torch.randn(runs * batch, high, wide, outputs, **make)
    taps = torch.randn(runs, outputs, count, inputs, **make)
    half_x, half_g = convolution.to_half(x), convolution.to_half(g)
    shape = (*x.shape[:3], geometry.channels)
    padded = replace(geometry, channels=inputs)
    boxed = geometry.fits_boxes(side, side, inputs, outputs)
    ways: dict[str, tuple[Callable[[], object], str, Iterable[Tile]]] = {
        "outputs": (
            lambda: convolution.convolve(x, taps, None, padded, relu=True),
            "box_tile" if boxed else "block_tile",
            _products(geometry.outputs, inputs, x.element_size()),
        ),
        "inputs": (
            lambda: convolution.input_gradient(g, taps, shape, padded, activation=None, half=False),
            "box_tile" if boxed else "block_tile",
            _products(geometry.channels, outputs, x.element_size()),
        ),
        "weights": (
            lambda: convolution.weight_gradient(half_x, half_g, geometry),
            "weight_box_tile" if boxed else "weight_block_tile",
            _sums(outputs, inputs, boxed and geometry.kw == 3),
        ),
    }
    for do, name, tiles in ways.values():
        _compile(do, name, tiles)
    found = {}
    for what, (do, name, tiles) in ways.items():
        times: dict[Tile, float] = {}
        for tile in tiles:
            with _instead(name, tile):
                try:
                    times[tile] = _time(do, repeats)
                except Exception as error:  # what does not fit into a processor says so in many ways
                    print(f"  {tile}: {str(error).splitlines()[0][:80]}", flush=True)
        found[what] = (_time(do, repeats), times)
    return found


def _products(outputs: int, channels: int, size: int) -> list[Tile]:
    """Rows, outputs, channels of a tile, warps and stages."""
    deep = min(128 // size, max(16, next_power_of_two(channels)))
    found = []
    for rows in (128, 256):
        for wide in {min(limit, max(16, next_power_of_two(outputs))) for limit in (64, 128, 256)}:
            most = min(4, SHARED // ((rows + wide) * deep * size))
            for warps in (4, 8):
                if 16 <= rows * wide // (32 * warps) <= 128:
                    found += [(rows, wide, deep, warps, stages) for stages in range(2, most + 1)]
    return found


def _sums(outputs: int, channels: int, three: bool) -> list[Tile]:
    """Outputs, channels, rows of a tile, warps, stages, and whether three taps at once."""
    found = []
    for wide in {64, min(128, max(64, next_power_of_two(outputs)))}:
        for narrow in {min(limit, max(16, next_power_of_two(channels))) for limit in (64, 128, 256)}:
            for rows in {64, 8192 // wide}:
                for warps in (4, 8):
                    for taps in {1, 3 if three else 1}:
                        stages = min(4, SHARED // ((wide + taps * narrow) * rows * 2))
                        held = wide * narrow * taps // (32 * warps)
                        if stages >= 2 and 16 <= held <= 192:
                            found.append((wide, narrow, rows, warps, stages, taps == 3))
    return found


@contextmanager
def _instead(name: str, tile: Tile) -> Iterator[None]:
    """While this lasts, these tiles."""
    before = getattr(convolution, name)
    setattr(convolution, name, lambda *told: tile)
    try:
        yield
    finally:
        setattr(convolution, name, before)


def _compile(do: Callable[[], object], name: str, tiles: Iterable[Tile]) -> None:
    """On all cores; what cannot be compiled is met again when it is timed."""
    with dry_run(ignore_errors=True):
        for tile in tiles:
            with _instead(name, tile):
                do()


def _time(do: Callable[[], object], repeats: int) -> float:
    """Microseconds of one."""
    for _ in range(2):
        do()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        do()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats * 1000
