"""The same training through Avalanche, through `mooring.attach` and as a fleet: microseconds a model-step of each.

Avalanche trains as its users do: its own strategy and data loader, tensors in the host's memory. What its EWC does at
the end of a task, another pass over the data, is not counted; ours has done that work within its steps.
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
    parser.add_argument("--runs", type=int, help="in the fleet; 8 on a CPU, 128 on a GPU")
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--methods", type=names, default=["ewc", "si"])
    parser.add_argument("--steps", type=int, help="in a task; 40 on a CPU, 110 on a GPU")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workers", type=int, default=0, help="of Avalanche's data loader; 0 is its default")


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One line for each method."""
    if importlib.util.find_spec("avalanche") is None:
        say(options, f"Avalanche is not installed, and there is nothing to compare with: {INSTALL}")
        return []
    if "bf16" in options.dtype or not {*options.methods} <= {"ewc", "si"}:
        raise MooringError("Avalanche is compared in ewc and si, and has no autocast: give those, in float32 or tf32")
    from fleets.through_avalanche import through_avalanche

    runs = options.runs or (128 if options.device.startswith("cuda") else 8)
    stream = noise(options.batch, steps_of(options))
    told: list[dict[str, Any]] = []
    for dtype in options.dtype:
        say(options, f"{options.network}, batch {options.batch}, {dtype}, {where(options.device)}: a step of a run")
        columns = ("avalanche", "attach", f"{runs} in a fleet", "avalanche/attach", "avalanche/fleet")
        say(options, f"{'':6s}{columns[0]:>12s}{columns[1]:>12s}{columns[2]:>18s}{columns[3]:>18s}{columns[4]:>17s}")
        for method in options.methods:
            specs = specs_of(stream, method, options.network, runs, options.batch, dtype)
            theirs, ours = [], []
            for _ in range(options.repeats):
                theirs.append(through_avalanche(specs[0], stream, options.device, options.workers))
                ours.append(pace(specs, stream, options.device, few=1, repeats=1))
            peer, alone, fleet = (
                statistics.median(found)
                for found in (theirs, [each.loop for each in ours], [each.fleet for each in ours])
            )
            row = f"{method:6s}{peer:9.1f} us{alone:9.1f} us{fleet:15.1f} us"
            say(options, f"{row}{peer / alone:18.2f}{peer / fleet:17.1f}")
            shape = {"network": options.network, "runs": runs, "batch": options.batch, "dtype": dtype}
            figures = {"avalanche_us": peer, "attach_us": alone, "fleet_us": fleet}
            ratios = {"avalanche_over_attach": peer / alone, "avalanche_over_fleet": peer / fleet}
            told.append({"method": method, **figures, **ratios, **shape, "device": where(options.device)})
            keep(options, told)
    return told
