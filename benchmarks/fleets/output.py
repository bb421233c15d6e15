"""Options and output that all modes share."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from fleets.clock import WARMUP_STEPS
from mooring.errors import MooringError
from mooring_lab.model.precision import check_precision
from mooring_lab.model.spec import DTYPES

__all__ = ["add_common", "checked", "keep", "names", "say", "steps_of", "where"]


def names(text: str) -> list[str]:
    """Split a comma-separated list."""
    return [word.strip() for word in text.split(",") if word.strip()]


def add_common(parser: argparse.ArgumentParser, *, cpu: str = "float32", cuda: str = "tf32") -> None:
    """Add the options that every mode has, and set the default dtypes."""
    parser.add_argument("--device", default="cpu")
    default = f"default: {cpu} on a CPU, {cuda} on a GPU" if cpu != cuda else f"default: {cpu}"
    parser.add_argument("--dtype", type=names, help=f"one or several of {', '.join(DTYPES)}; {default}")
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="also write JSON to FILE; without FILE, print only JSON"
    )
    parser.set_defaults(cpu_dtype=cpu, cuda_dtype=cuda)


def checked(options: argparse.Namespace) -> argparse.Namespace:
    """Return the options with their defaults; raise an error if this machine does not support them."""
    cuda = options.device.startswith("cuda")
    if cuda and not torch.cuda.is_available():
        raise MooringError("cuda is not available here: give --device cpu")
    options.dtype = options.dtype or names(options.cuda_dtype if cuda else options.cpu_dtype)
    for dtype in options.dtype:
        if dtype not in DTYPES:
            raise MooringError(f"unknown dtype {dtype!r}; allowed: {', '.join(DTYPES)}")
        check_precision(dtype, options.device)
    return options


def steps_of(options: argparse.Namespace) -> int:
    """Return the number of steps of a task: the given number, or enough for a CUDA graph to pay off."""
    steps = 110 if options.device.startswith("cuda") else 40
    if options.steps is not None and options.steps <= WARMUP_STEPS:
        raise MooringError(f"steps={options.steps} is not allowed: the clock starts after {WARMUP_STEPS}")
    return options.steps or steps


def say(options: argparse.Namespace, line: str = "") -> None:
    """Print a line at once, to standard error if standard output is for JSON."""
    print(line, file=sys.stderr if options.json == "-" else sys.stdout, flush=True)


def keep(options: argparse.Namespace, results: Any) -> None:
    """Write the results as JSON to the file of --json."""
    if options.json not in (None, "-"):
        Path(options.json).write_text(json.dumps(results, indent=1) + "\n")


def where(device: str) -> str:
    """Return the name of the GPU, or the number of CPU threads."""
    return torch.cuda.get_device_name() if device.startswith("cuda") else f"{torch.get_num_threads()} threads"
