"""Time each convolution of a network with other tiles than those of `mooring_lab.fleet.gpu.conv_tiles`."""

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
from mooring_lab.fleet.gpu import convolution
from mooring_lab.fleet.gpu.conv_tiles import ConvolutionGeometry, align_channels, next_power_of_two
from mooring_lab.model.precision import product_dtype, tf32_mode
from mooring_lab.networks import BACKBONES

__all__ = ["add_options", "run"]

SHARED_MEMORY_BYTES = 225_000
"""The shared memory of a processor that tiles may use."""

Tile = tuple[int | bool, ...]


def add_options(parser: argparse.ArgumentParser) -> None:
    add_common(parser, cuda="bf16")
    parser.add_argument("--network", default="cnn6")
    parser.add_argument("--runs", type=int, default=16)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=10)


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time every tile for every shape and direction, and print the fastest and the one in use."""
    if not convolution.has_kernels(options.device):
        raise MooringError("tiles need GPU kernels: give --device cuda")
    rows: list[dict[str, Any]] = []
    for dtype in options.dtype:
        say(
            options,
            f"{options.runs} runs of {options.network}, batch {options.batch}, {dtype}, {where(options.device)}",
        )
        say(options, f"{'in':>4s}{'out':>5s}{'side':>5s}  {'what':9s}{'used':>10s}{'fastest':>10s}  in tiles")
        for geometry, side in _convolutions(options.network, options.runs):
            with tf32_mode(dtype):
                measured = _time_tiles(
                    geometry, side, options.batch, product_dtype(dtype) or torch.float32, options.repeats
                )
            for direction, (used, times) in measured.items():
                best = min(times, key=lambda tile: times[tile])
                shape = f"{geometry.channels:4d}{geometry.outputs:5d}{side:5d}  {direction:9s}"
                say(options, f"{shape}{used:7.0f} us{times[best]:7.0f} us  {best}")
                tiles_us = {str(tile): time for tile, time in sorted(times.items(), key=lambda pair: pair[1])}
                rows.append(
                    {"shape": str(geometry), "side": side, "what": direction, "used_us": used, "tiles_us": tiles_us}
                )
        keep(options, rows)
    return rows


def _convolutions(network: str, runs: int) -> list[tuple[ConvolutionGeometry, int]]:
    """Return each shape once, with the side of its images; the first layer, computed as one product, is left out."""
    geometries: dict[tuple[ConvolutionGeometry, int], None] = {}

    def record(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(layer, nn.Conv2d)
        shape = (layer.out_channels, layer.in_channels, *layer.kernel_size)
        geometries[ConvolutionGeometry(runs, *shape, layer.stride[0], int(layer.padding[0])), inputs[0].shape[2]] = None

    model = BACKBONES[network]((3, 32, 32))
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            layer.register_forward_pre_hook(record)
    model(torch.zeros(2, 3, 32, 32))
    return list(geometries)[1:]


def _time_tiles(
    geometry: ConvolutionGeometry, side: int, batch: int, dtype: torch.dtype, repeats: int
) -> dict[str, tuple[float, dict[Tile, float]]]:
    """Return, by direction, the microseconds of the tile in use and of every other tile."""
    runs, count = geometry.runs, geometry.kh * geometry.kw
    inputs, outputs = align_channels(geometry.channels), align_channels(geometry.outputs)
    high, wide = geometry.output_size(side, side)
    tensor_options = {"device": "cuda", "dtype": dtype}
    x = torch.randn(runs * batch, side, side, inputs, **tensor_options)
    g = torch.randn(runs * batch, high, wide, outputs, **tensor_options)
    taps = torch.randn(runs, outputs, count, inputs, **tensor_options)
    half_x, half_g = convolution.to_half(x), convolution.to_half(g)
    shape = (*x.shape[:3], geometry.channels)
    padded = replace(geometry, channels=inputs)
    boxed = geometry.fits_boxes(side, side, inputs, outputs)
    directions: dict[str, tuple[Callable[[], object], str, Iterable[Tile]]] = {
        "outputs": (
            lambda: convolution.convolve(x, taps, None, padded, relu=True),
            "box_tile" if boxed else "block_tile",
            _product_tiles(geometry.outputs, inputs, x.element_size()),
        ),
        "inputs": (
            lambda: convolution.input_gradient(g, taps, shape, padded, activation=None, half=False),
            "box_tile" if boxed else "block_tile",
            _product_tiles(geometry.channels, outputs, x.element_size()),
        ),
        "weights": (
            lambda: convolution.weight_gradient(half_x, half_g, geometry),
            "weight_box_tile" if boxed else "weight_block_tile",
            _sum_tiles(outputs, inputs, boxed and geometry.kw == 3),
        ),
    }
    for launch, name, tiles in directions.values():
        _compile(launch, name, tiles)
    measured = {}
    for direction, (launch, name, tiles) in directions.items():
        times: dict[Tile, float] = {}
        for tile in tiles:
            with _use_tile(name, tile):
                try:
                    times[tile] = _time(launch, repeats)
                except Exception as error:  # a tile that does not fit raises different errors
                    print(f"  {tile}: {str(error).splitlines()[0][:80]}", flush=True)
        measured[direction] = (_time(launch, repeats), times)
    return measured


def _product_tiles(outputs: int, channels: int, size: int) -> list[Tile]:
    """Return candidates: rows, outputs and channels of a tile, warps, stages."""
    deep = min(128 // size, max(16, next_power_of_two(channels)))
    tile_list = []
    for rows in (128, 256):
        for wide in {min(limit, max(16, next_power_of_two(outputs))) for limit in (64, 128, 256)}:
            max_stages = min(4, SHARED_MEMORY_BYTES // ((rows + wide) * deep * size))
            for warps in (4, 8):
                if 16 <= rows * wide // (32 * warps) <= 128:
                    tile_list += [(rows, wide, deep, warps, stages) for stages in range(2, max_stages + 1)]
    return tile_list


def _sum_tiles(outputs: int, channels: int, three_taps: bool) -> list[Tile]:
    """Return candidates: outputs, channels and rows of a tile, warps, stages, and whether it has three taps."""
    tile_list = []
    for wide in {64, min(128, max(64, next_power_of_two(outputs)))}:
        for narrow in {min(limit, max(16, next_power_of_two(channels))) for limit in (64, 128, 256)}:
            for rows in {64, 8192 // wide}:
                for warps in (4, 8):
                    for taps in {1, 3 if three_taps else 1}:
                        stages = min(4, SHARED_MEMORY_BYTES // ((wide + taps * narrow) * rows * 2))
                        accumulators = wide * narrow * taps // (32 * warps)
                        if stages >= 2 and 16 <= accumulators <= 192:
                            tile_list.append((wide, narrow, rows, warps, stages, taps == 3))
    return tile_list


@contextmanager
def _use_tile(name: str, tile: Tile) -> Iterator[None]:
    """Replace the choice of tiles inside the context."""
    previous = getattr(convolution, name)
    setattr(convolution, name, lambda *arguments: tile)
    try:
        yield
    finally:
        setattr(convolution, name, previous)


def _compile(launch: Callable[[], object], name: str, tiles: Iterable[Tile]) -> None:
    """Compile on all cores; errors appear again when a tile is timed."""
    with dry_run(ignore_errors=True):
        for tile in tiles:
            with _use_tile(name, tile):
                launch()


def _time(launch: Callable[[], object], repeats: int) -> float:
    """Return the microseconds of one launch."""
    for _ in range(2):
        launch()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        launch()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats * 1000
