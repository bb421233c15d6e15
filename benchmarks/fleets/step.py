"""Compare many runs in a fleet with the same runs one by one in a plain eager loop."""

import argparse
from typing import Any

from fleets.noise import noise
from fleets.output import add_common, keep, names, say, steps_of, where
from fleets.pace import pace, specs_of
from mooring_lab.streams import digits, permuted

__all__ = ["add_options", "run"]


def add_options(parser: argparse.ArgumentParser) -> None:
    add_common(parser, cuda="float32")
    parser.add_argument("--network", default="mlp")
    parser.add_argument("--runs", type=int, default=32)
    parser.add_argument("--loop-runs", type=int, help="number of runs in the loop; default: all on a CPU, 2 on a GPU")
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--methods", type=names, default=["plain", "explicit-ewc"])
    parser.add_argument(
        "--steps", type=int, help="steps of a task of random images; default: 40 on a CPU, 110 on a GPU"
    )
    parser.add_argument("--repeats", type=int, default=3)


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure both several times in turn and print the ratio of the medians."""
    demo = options.network == "mlp" and options.steps is None
    stream = permuted(digits(), 2) if demo else noise(options.batch, steps_of(options))
    loop_runs = options.loop_runs or (options.runs if options.device == "cpu" else 2)
    rows: list[dict[str, Any]] = []
    for dtype in options.dtype:
        head = f"{options.runs} runs of {options.network}, batch {options.batch}, {dtype}, {where(options.device)}"
        say(options, head)
        say(options, f"{'a step of a run':14s}{'one by one':>15s}{'fleet':>12s}{'times faster':>14s}")
        for method in options.methods:
            specs = specs_of(stream, method, options.network, options.runs, options.batch, dtype)
            measured = pace(specs, stream, options.device, loop_runs=loop_runs, repeats=options.repeats)
            say(options, f"{method:15s}{measured.loop:11.1f} us{measured.fleet:9.1f} us{measured.ratio:14.1f}")
            shape = {"network": options.network, "runs": options.runs, "batch": options.batch, "dtype": dtype}
            figures = {"loop_us": measured.loop, "fleet_us": measured.fleet, "ratio": measured.ratio}
            rows.append({"method": method, **figures, **shape, "device": where(options.device)})
            keep(options, rows)
    return rows
