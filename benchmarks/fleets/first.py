"""Measure the time to a fleet's first training step: with empty caches, with filled caches, in a running process.

Two processes share a new folder for the caches of Triton, Inductor and the driver, so the second process finds what the
first one compiled. Each process trains two fleets of the same shape.
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
    parser.add_argument(
        "--steps", type=int, default=15, help="steps of each of two tasks; enough to compile everything"
    )
    parser.add_argument("--patience", type=float, default=240, help="largest time of a process, in seconds")


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure three cases for each dtype, in seconds."""
    rows: list[dict[str, Any]] = []
    for dtype in options.dtype:
        shape = {"network": options.network, "runs": options.runs, "batch": options.batch, "dtype": dtype}
        head = f"{options.runs} runs of {options.network}, batch {options.batch}, {dtype}, {where(options.device)}"
        say(options, f"{head}: seconds to the first step of a fleet")
        say(options, f"{'':34s}{'import':>9s}{'build':>9s}{'first step':>12s}{'sum':>9s}{'then all compiled':>19s}")
        with tempfile.TemporaryDirectory(prefix="mooring-caches-") as folder:
            for case in ("a fresh process, caches empty", "a fresh process, caches kept"):
                times = _run_process(options, dtype, Path(folder))
                second = {"import": 0.0, **times["fleets"][1]}
                rows.append(_row(options, case, {"import": times["import"], **times["fleets"][0]}, shape))
                keep(options, rows)
            rows.append(_row(options, "a second fleet in that process", second, shape))
            keep(options, rows)
    return rows


def _row(options: argparse.Namespace, case: str, times: dict[str, float], shape: dict[str, Any]) -> dict[str, Any]:
    seconds = [times[part] for part in PARTS]
    total = sum(seconds[:3])
    say(options, f"{case:34s}{seconds[0]:9.2f}{seconds[1]:9.2f}{seconds[2]:12.2f}{total:9.2f}{seconds[3]:19.2f}")
    figures = {part.replace(" ", "_"): value for part, value in zip(PARTS, seconds, strict=True)}
    return {"case": case, **figures, "sum": total, **shape, "method": options.method, "device": where(options.device)}


def _run_process(options: argparse.Namespace, dtype: str, folder: Path) -> dict[str, Any]:
    """Train in a new process with its caches in that folder, and return its times."""
    here = str(Path(__file__).parent.parent)
    path = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
    caches = {name: str(folder / name.lower()) for name in CACHES}
    request = {name: getattr(options, name) for name in ("network", "runs", "batch", "method", "steps", "device")}
    request |= {"dtype": dtype, "spawned": time.time()}
    command = [sys.executable, "-m", "fleets.fresh_process", json.dumps(request)]
    try:
        process = subprocess.run(
            command,
            env={**os.environ, **caches, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=options.patience,
        )
    except subprocess.TimeoutExpired as error:
        raise MooringError(f"no first step within {options.patience:g} s: give more --patience") from error
    if process.returncode:
        raise MooringError(
            f"a fresh process failed: {(process.stderr.strip().splitlines() or ['it said nothing'])[-1]}"
        )
    times: dict[str, Any] = json.loads(process.stdout.strip().splitlines()[-1])
    return times
