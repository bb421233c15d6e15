"""What every mode has in common: its options, lines as they come, and JSON beside them."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from fleets.clock import WARM
from mooring.errors import MooringError
from mooring.lab.model.precision import check_precision
from mooring.lab.model.spec import DTYPES

__all__ = ["add_common", "checked", "keep", "names", "say", "steps_of", "where"]


def names(text: str) -> list[str]:
    """Words between commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


def add_common(parser: argparse.ArgumentParser, *, cpu: str = "float32", cuda: str = "tf32") -> None:
    """The options that every mode has, and what its dtype is where none is given."""
    parser.add_argument("--device", default="cpu")
    default = f"default: {cpu} on a CPU, {cuda} on a GPU" if cpu != cuda else f"default: {cpu}"
    parser.add_argument("--dtype", type=names, help=f"one or several of {', '.join(DTYPES)}; {default}")
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="also write JSON; without FILE, only that")
    parser.set_defaults(cpu_dtype=cpu, cuda_dtype=cuda)


def checked(options: argparse.Namespace) -> argparse.Namespace:
    """The options with their defaults put in, refused where this machine cannot do what they ask for."""
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
    """Steps in a task: as many as asked for, or enough for a graph to pay."""
    steps = 110 if options.device.startswith("cuda") else 40
    if options.steps is not None and options.steps <= WARM:
        raise MooringError(f"steps={options.steps} is not allowed: the clock starts after {WARM}")
    return options.steps or steps


def say(options: argparse.Namespace, line: str = "") -> None:
    """A line for people, at once; out of the way where standard output is for machines."""
    print(line, file=sys.stderr if options.json == "-" else sys.stdout, flush=True)


def keep(options: argparse.Namespace, found: Any) -> None:
    """What was found, as JSON in the file asked for."""
    if options.json not in (None, "-"):
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n")


def where(device: str) -> str:
    """What it ran on."""
    return torch.cuda.get_device_name() if device.startswith("cuda") else f"{torch.get_num_threads()} threads"
