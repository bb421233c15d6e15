"""Compare the microseconds per model-step of Avalanche, of `mooring.attach` and of a fleet.

Avalanche uses its own strategy and data loader, with tensors in host memory. The extra pass over the data of its EWC at
the end of a task is not counted; Mooring does that work within its steps.
"""

import argparse
import importlib.util
import statistics
from typing import Any

from fleets.noise import noise
from fleets.output import add_common, keep, names, say, steps_of, where
from fleets.pace import pace, specs_of
from mooring.errors import MooringError

__all__ = ["INSTALL", "add_options", "run"]

INSTALL = "pip install avalanche-lib"


def add_options(parser: argparse.ArgumentParser) -> None:
    add_common(parser)
    parser.add_argument("--network", default="cnn6")
    parser.add_argument("--runs", type=int, help="runs in the fleet; default: 8 on a CPU, 128 on a GPU")
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--methods", type=names, default=["ewc", "si"])
    parser.add_argument("--steps", type=int, help="steps of a task; default: 40 on a CPU, 110 on a GPU")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workers", type=int, default=0, help="workers of Avalanche's data loader; 0 is its default")


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure and print one line per method."""
    if importlib.util.find_spec("avalanche") is None:
        say(options, f"Avalanche is not installed: {INSTALL}")
        return []
    if "bf16" in options.dtype or not {*options.methods} <= {"ewc", "si"}:
        raise MooringError(
            "Avalanche is compared with ewc and si, without autocast: give those methods, and float32 or tf32"
        )
    from fleets.through_avalanche import through_avalanche

    runs = options.runs or (128 if options.device.startswith("cuda") else 8)
    stream = noise(options.batch, steps_of(options))
    rows: list[dict[str, Any]] = []
    for dtype in options.dtype:
        say(options, f"{options.network}, batch {options.batch}, {dtype}, {where(options.device)}: a step of a run")
        columns = ("avalanche", "attach", f"{runs} in a fleet", "avalanche/attach", "avalanche/fleet")
        say(options, f"{'':6s}{columns[0]:>12s}{columns[1]:>12s}{columns[2]:>18s}{columns[3]:>18s}{columns[4]:>17s}")
        for method in options.methods:
            specs = specs_of(stream, method, options.network, runs, options.batch, dtype)
            avalanche_times, paces = [], []
            for _ in range(options.repeats):
                avalanche_times.append(through_avalanche(specs[0], stream, options.device, options.workers))
                paces.append(pace(specs, stream, options.device, loop_runs=1, repeats=1))
            peer, alone, fleet = (
                statistics.median(times)
                for times in (
                    avalanche_times,
                    [measured.loop for measured in paces],
                    [measured.fleet for measured in paces],
                )
            )
            row = f"{method:6s}{peer:9.1f} us{alone:9.1f} us{fleet:15.1f} us"
            say(options, f"{row}{peer / alone:18.2f}{peer / fleet:17.1f}")
            shape = {"network": options.network, "runs": runs, "batch": options.batch, "dtype": dtype}
            figures = {"avalanche_us": peer, "attach_us": alone, "fleet_us": fleet}
            ratios = {"avalanche_over_attach": peer / alone, "avalanche_over_fleet": peer / fleet}
            rows.append({"method": method, **figures, **ratios, **shape, "device": where(options.device)})
            keep(options, rows)
    return rows
