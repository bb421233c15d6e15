"""Measure model-steps per second for several sizes of the fleet, and compare them with the device's limit.

The limit of a model-step is its arithmetic at the rate of a large matrix product in the same precision, plus the bytes
of its update at the rate of a copy (`fleets.ceiling`); both rates are measured in the same run. The results and the
figure are written after every size. No size starts after `--seconds`.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from fleets.ceiling import copy_rate, product_rate, work_of
from fleets.noise import noise
from fleets.output import add_common, keep, say, steps_of, where
from fleets.pace import one_by_one, specs_of, together
from fleets.scaling_figure import draw
from mooring.errors import MooringError
from mooring_lab.model.precision import tf32_mode

__all__ = ["add_options", "run"]

SIZES = "1,2,4,8,16,32,64,128,256,512"


def add_options(parser: argparse.ArgumentParser) -> None:
    add_common(parser)
    parser.add_argument("--network", default="cnn6")
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--method", default="explicit-ewc")
    parser.add_argument("--sizes", type=lambda text: [int(word) for word in text.split(",")], default=SIZES)
    parser.add_argument("--steps", type=int, help="steps of a task; default: 40 on a CPU, 110 on a GPU")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=480, help="start no size after this time")
    parser.add_argument("--matmul", type=int, help="size of the matrix product; 1024 on a CPU, 8192 on a GPU")
    parser.add_argument("--copy", type=int, help="bytes of the copy; 128 MiB on a CPU, 4 GiB on a GPU")
    parser.add_argument("--plot", metavar="PNG", help="draw the figure to this file")
    parser.add_argument("--draw", metavar="JSON", help="measure nothing; draw the results of this file to --plot")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure one series per dtype, and print one line per size."""
    if options.draw:
        if not options.plot:
            raise MooringError("--draw needs a file for the figure: give --plot PNG")
        stored: dict[str, Any] = json.loads(Path(options.draw).read_text())
        draw(stored, options.plot)
        return stored
    start = time.perf_counter()
    stream = noise(options.batch, steps_of(options))
    work = work_of(options.network, stream, options.batch)
    bandwidth = copy_rate(options.device, options.copy)
    shape = {"network": options.network, "batch": options.batch, "method": options.method}
    results: dict[str, Any] = {**shape, "device": where(options.device), "flops": work.flops, "bytes": work.bytes}
    results |= {"copy_bytes_per_second": bandwidth, "curves": []}
    say(options, f"{options.network}, batch {options.batch}, {options.method}, {where(options.device)}")
    say(
        options, f"a model-step: {work.flops / 1e9:.2f} GFLOP, {work.bytes / 1e6:.1f} MB at {bandwidth / 1e12:.3f} TB/s"
    )
    for dtype in options.dtype:
        rate = product_rate(options.device, dtype, options.matmul)
        limit = work.limit_us(rate, bandwidth)
        specs = specs_of(stream, options.method, options.network, max(options.sizes), options.batch, dtype)
        with tf32_mode(dtype):
            alone = one_by_one(specs[:1], stream, options.device)
        series: dict[str, Any] = {"dtype": dtype, "matmul_flops_per_second": rate, "limit_us": limit}
        series |= {"eager_us": alone, "points": []}
        results["curves"].append(series)
        say(options, f"{dtype}: products at {rate / 1e12:.2f} TFLOP/s, limit {limit:.1f} us; eager {alone:.1f} us")
        say(
            options,
            f"{'runs':>6s}{'us a model-step':>17s}{'model-steps/s':>15s}{'times eager':>13s}{'of the limit':>14s}",
        )
        for size in options.sizes:
            if time.perf_counter() - start > options.seconds:
                say(options, f"{size:6d}  not started: {options.seconds:g} s are over")
                continue
            with tf32_mode(dtype):
                times = [together(specs[:size], stream, options.device) for _ in range(options.repeats)]
            us = statistics.median(times)
            row = f"{size:6d}{us:17.1f}{1e6 / us:15.0f}{alone / us:13.1f}{100 * limit / us:12.1f} %"
            say(options, row)
            series["points"].append({"runs": size, "us": us, "steps_per_second": 1e6 / us, "times_eager": alone / us})
            keep(options, results)
            if options.plot:
                draw(results, options.plot)
    return results
