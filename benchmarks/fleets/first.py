"""How long a new fleet takes to its first training step: with compile caches empty, kept, and in a running process.

Each process starts with its caches in a folder of its own: what Triton, Inductor and the driver compile in the first
is there for the second. A second fleet of the same shape follows in each process.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fleets.output import add_common, keep, say, where
from mooring.errors import MooringError

__all__ = ["add_options", "run"]

PARTS = ("import", "build", "first step", "all compiled")
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH", "XDG_CACHE_HOME")


def add_options(parser: argparse.ArgumentParser) -> None:
    add_common(parser)
    parser.add_argument("--network", default="cnn6")
    parser.add_argument("--runs", type=int, default=128)
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--method", default="explicit-ewc")
    parser.add_argument("--steps", type=int, default=15, help="in each of two tasks, to compile all there is")
    parser.add_argument("--patience", type=float, default=240, help="seconds after which a process is given up")


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Three cases for each dtype; seconds."""
    told: list[dict[str, Any]] = []
    for dtype in options.dtype:
        shape = {"network": options.network, "runs": options.runs, "batch": options.batch, "dtype": dtype}
        head = f"{options.runs} runs of {options.network}, batch {options.batch}, {dtype}, {where(options.device)}"
        say(options, f"{head}: seconds to the first step of a fleet")
        say(options, f"{'':34s}{'import':>9s}{'build':>9s}{'first step':>12s}{'sum':>9s}{'then all compiled':>19s}")
        with tempfile.TemporaryDirectory(prefix="mooring-caches-") as folder:
            for case in ("a fresh process, caches empty", "a fresh process, caches kept"):
                found = _process(options, dtype, Path(folder))
                second = {"import": 0.0, **found["fleets"][1]}
                told.append(_told(options, case, {"import": found["import"], **found["fleets"][0]}, shape))
                keep(options, told)
            told.append(_told(options, "a second fleet in that process", second, shape))
            keep(options, told)
    return told


def _told(options: argparse.Namespace, case: str, found: dict[str, float], shape: dict[str, Any]) -> dict[str, Any]:
    seconds = [found[part] for part in PARTS]
    total = sum(seconds[:3])
    say(options, f"{case:34s}{seconds[0]:9.2f}{seconds[1]:9.2f}{seconds[2]:12.2f}{total:9.2f}{seconds[3]:19.2f}")
    figures = {part.replace(" ", "_"): value for part, value in zip(PARTS, seconds, strict=True)}
    return {"case": case, **figures, "sum": total, **shape, "method": options.method, "device": where(options.device)}


def _process(options: argparse.Namespace, dtype: str, folder: Path) -> dict[str, Any]:
    """A fresh process with its caches in that folder."""
    here = str(Path(__file__).parent.parent)
    path = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
    caches = {name: str(folder / name.lower()) for name in CACHES}
    asked = {name: getattr(options, name) for name in ("network", "runs", "batch", "method", "steps", "device")}
    asked |= {"dtype": dtype, "spawned": time.time()}
    command = [sys.executable, "-m", "fleets.newborn", json.dumps(asked)]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **caches, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=options.patience,
        )
    except subprocess.TimeoutExpired as error:
        raise MooringError(f"no first step within {options.patience:g} s: give more --patience") from error
    if done.returncode:
        raise MooringError(f"a fresh process failed: {(done.stderr.strip().splitlines() or ['it said nothing'])[-1]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found
