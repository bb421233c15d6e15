"""Count the directions in which GPM and NSCL still let each layer move, after every task of a stream of digits.

The stream, the network and the training are those of docs/projections.md, and so are the strengths.

    python benchmarks/free_directions.py --json docs/figures/free-directions.jsonl
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from mooring_lab.fleet.fleet import Fleet
from mooring_lab.methods.projections.gradient_projection import GradientProjection
from mooring_lab.model.spec import RunSpec
from mooring_lab.streams import Stream, digits, permuted, rotated

CASES = [("permutations", "gpm", 0.03), ("permutations", "nscl", 1000.0), ("rotations", "nscl", 10000.0)]
"""A stream, a method and the strength that was chosen for it there."""

TASKS = 5


class Counts:
    """A callback that counts free directions after each task: the trace of each layer's projection.

    Attributes:
        layers: for each layer its inputs, the bias included, and for each task one count per run.
    """

    def __init__(self) -> None:
        self.layers: dict[str, dict[str, Any]] = {}

    def on_step(self, fleet: Fleet) -> None:
        """Do nothing."""

    def on_task_end(self, fleet: Fleet) -> None:
        """Count; after the last task, nothing is projected any more."""
        if fleet.position.task == len(fleet.stream.tasks):
            return
        assert isinstance(fleet.learner, GradientProjection)
        for name, state in fleet.learner.states.items():
            traces = state["projection"].diagonal(dim1=-2, dim2=-1).sum((-2, -1))
            layer = self.layers.setdefault(name, {"inputs": state["projection"].shape[-1], "free": []})
            layer["free"].append([round(trace) for trace in traces.tolist()])


def make_stream(name: str, tasks: int) -> Stream:
    """Return the stream of this name."""
    return permuted(digits(), tasks) if name == "permutations" else rotated(digits(), tasks)


def count(stream: Stream, method: str, strength: float, seeds: int, epochs: int) -> dict[str, dict[str, Any]]:
    """Train a run for each seed, and return the counts of each layer, from the input to the output."""
    counts = Counts()
    specs = [
        RunSpec(stream.name, stream.fingerprint, method, seed, strength=strength, epochs=epochs)
        for seed in range(seeds)
    ]
    Fleet(specs, stream).run(counts)
    return counts.layers


def main(arguments: list[str] | None = None) -> int:
    """Count, print and store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--tasks", type=int, default=TASKS)
    parser.add_argument("--json", type=Path, help="write the counts to this file, a line for each case")
    options = parser.parse_args(arguments)
    results = []
    for stream, method, strength in CASES:
        layers = count(make_stream(stream, options.tasks), method, strength, options.seeds, options.epochs)
        settings = {"stream": stream, "method": method, "strength": strength, "epochs": options.epochs}
        results.append({**settings, "seeds": options.seeds, "layers": layers})
        for name, layer in layers.items():
            ranges = ", ".join(f"{min(free)} to {max(free)}" for free in layer["free"])
            print(f"{stream}, {method} {strength:g}, {name}: {ranges} of {layer['inputs']}", flush=True)
    if options.json:
        options.json.write_text("".join(f"{json.dumps(row)}\n" for row in results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
