"""Compare a fleet's floating-point operations per second with those of a large matrix product in the same precision."""

import argparse
from typing import Any

from fleets.ceiling import product_rate, work_of
from fleets.noise import noise
from fleets.output import add_common, keep, names, say, steps_of, where
from fleets.pace import pace, specs_of

__all__ = ["add_options", "run"]


def add_options(parser: argparse.ArgumentParser) -> None:
    add_common(parser, cuda="tf32,bf16")
    parser.add_argument("--network", default="cnn6")
    parser.add_argument("--runs", type=int, default=16)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--methods", type=names, default=["explicit-ewc"])
    parser.add_argument("--steps", type=int, help="steps of a task; default: 40 on a CPU, 110 on a GPU")
    parser.add_argument("--loop-runs", type=int, default=1, help="number of runs in the loop")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--matmul", type=int, help="size of the matrix product; 1024 on a CPU, 8192 on a GPU")


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the rates; operations are counted as in `fleets.ceiling`: 3 * forward - forward of the first layer."""
    stream = noise(options.batch, steps_of(options))
    work = work_of(options.network, stream, options.batch)
    head = f"{options.runs} runs of {options.network}, batch {options.batch}, {where(options.device)}"
    say(options, f"{head}; a model-step is {work.flops / 1e9:.2f} GFLOP, 3 * forward - forward of the first layer")
    columns = ("one by one", "fleet", "times faster", "TFLOP/s", "matmul", "share")
    say(options, f"{'dtype':9s}{'method':14s}" + "".join(f"{column:>13s}" for column in columns))
    rows: list[dict[str, Any]] = []
    for dtype in options.dtype:
        ceiling = product_rate(options.device, dtype, options.matmul) / 1e12
        for method in options.methods:
            specs = specs_of(stream, method, options.network, options.runs, options.batch, dtype)
            measured = pace(specs, stream, options.device, loop_runs=options.loop_runs, repeats=options.repeats)
            rate = work.flops / measured.fleet / 1e6
            row = f"{dtype:9s}{method:14s}{measured.loop:10.1f} us{measured.fleet:10.1f} us{measured.ratio:13.1f}"
            say(options, f"{row}{rate:13.2f}{ceiling:13.2f}{100 * rate / ceiling:11.1f} %")
            shape = {"network": options.network, "runs": options.runs, "batch": options.batch, "dtype": dtype}
            figures = {"loop_us": measured.loop, "fleet_us": measured.fleet, "ratio": measured.ratio, "tflops": rate}
            ceilings = {"flops": work.flops, "matmul_tflops": ceiling, "share": rate / ceiling}
            rows.append({"method": method, **figures, **ceilings, **shape, "device": where(options.device)})
            keep(options, rows)
    return rows
