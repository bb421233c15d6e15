"""Measure the processor time of FTP and TPGM, which learn the radii of the same balls in different ways.

Five runs in a fleet learn five permutations of the digits on one core. The methods take turns, and the fastest turn of
each counts, because other work on the machine only makes a turn slower.

    python benchmarks/projection_time.py --json docs/figures/projection-time.json
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch

from mooring_lab.fleet.fleet import Fleet
from mooring_lab.model.spec import RunSpec
from mooring_lab.streams import Stream, digits, permuted

STRENGTHS = {"plain": None, "ftp": 0.01, "tpgm": 0.1}
"""The methods, with the strengths that were chosen for permutations."""


def seconds(stream: Stream, method: str, runs: int) -> float:
    """Train once, and return the processor time."""
    options = {"strength": STRENGTHS[method], "epochs": 1, "memory": 500 if method == "tpgm" else None}
    fleet = Fleet([RunSpec(stream.name, stream.fingerprint, method, seed, **options) for seed in range(runs)], stream)
    start = time.process_time()
    fleet.run()
    return time.process_time() - start


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--tasks", type=int, default=5)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write the seconds of every turn to this file")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    stream = permuted(digits(), options.tasks)
    seconds(stream, "plain", options.runs)  # the first one takes longer
    turns = [{method: seconds(stream, method, options.runs) for method in STRENGTHS} for _ in range(options.turns)]
    for method in STRENGTHS:
        print(f"{method:6s} {min(turn[method] for turn in turns):6.2f} s")
    if options.json:
        settings = {"runs": options.runs, "tasks": options.tasks, "epochs": 1}
        options.json.write_text(json.dumps({**settings, "turns": turns}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
