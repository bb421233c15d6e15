"""What a fleet saves: 32 runs together, over the same 32 runs one after the other through a plain eager loop.

Both do the same arithmetic on the same batches: the loop is ordinary PyTorch with `torch.optim.SGD` and, where the
method has one, `mooring.attach`. A test asserts that both end at the same weights.

    python benchmarks/fleet.py [--runs 32] [--epochs 1] [--json]
"""

import argparse
import json
import statistics
import time

import torch
from torch.nn.functional import cross_entropy

import mooring
from mooring.lab.fleet.fleet import Fleet
from mooring.lab.methods import find
from mooring.lab.networks.inputs import scaled
from mooring.lab.networks.start import start
from mooring.lab.order import task_order
from mooring.lab.spec import RunSpec
from mooring.lab.streams import Stream, digits, permuted

METHODS = ("plain", "explicit-ewc")


def one_by_one(specs: list[RunSpec], stream: Stream) -> float:
    """Seconds for the training loops, one run after the other."""
    seconds = 0.0
    for spec in specs:
        method = find(spec.method)
        model = start(spec.network, stream, spec.seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=spec.lr, momentum=spec.momentum)
        moor = method.importance and mooring.attach(model, optimizer, importance=method.importance(spec.seed))
        began = time.perf_counter()
        for number, task in enumerate(stream.tasks):
            optimizer.state.clear()
            for epoch in range(spec.epochs):
                for batch in task_order(spec.seed, number, epoch, task.train).split(spec.batch):
                    optimizer.zero_grad()
                    cross_entropy(model(scaled(stream.train.images[batch])), stream.train.labels[batch]).backward()
                    optimizer.step()
            if moor:
                moor.consolidate()
        seconds += time.perf_counter() - began
    return seconds


def together(specs: list[RunSpec], stream: Stream) -> float:
    """Seconds for the same training as a fleet; scoring is left out on both sides."""
    fleet = Fleet(specs, stream)
    fleet.sail()
    return fleet.seconds * len(specs)


def main() -> None:
    """Measure both in turn, several times, and print the ratio of their medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    stream = permuted(digits(), 2)
    told = []
    for method in METHODS:
        seeds = range(options.runs)
        specs = [RunSpec(stream.name, stream.fingerprint, method, seed, epochs=options.epochs) for seed in seeds]
        loop, fleet = [], []
        for _ in range(options.repeats):
            loop.append(one_by_one(specs, stream))
            fleet.append(together(specs, stream))
        pair = statistics.median(loop), statistics.median(fleet)
        told.append({"method": method, "loop_s": pair[0], "fleet_s": pair[1], "ratio": pair[0] / pair[1]})
    if options.json:
        print(json.dumps(told, indent=1))
        return
    print(f"{options.runs} runs of mlp on permuted digits, batch 20, {torch.get_num_threads()} threads")
    print(f"{'method':14s}{'one by one':>12s}{'fleet':>10s}{'times faster':>14s}")
    for row in told:
        print(f"{row['method']:14s}{row['loop_s']:10.2f} s{row['fleet_s']:8.2f} s{row['ratio']:14.1f}")


if __name__ == "__main__":
    main()
