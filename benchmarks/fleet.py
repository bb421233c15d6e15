"""What a fleet saves: many runs together, over runs of the same kind one after the other through a plain eager loop.

Both do the same arithmetic on the same batches: the loop is ordinary PyTorch with `torch.optim.SGD` and, where the
method has one, `mooring.attach`. Tests assert that both end at the same weights. Times are of the second task's steps,
without its first ones, per run and step; scoring is left out on both sides.

    python benchmarks/fleet.py                                          # 32 runs of the demo's network, on the CPU
    python benchmarks/fleet.py --network cnn6 --runs 128 --batch 10 --device cuda --dtype tf32
"""

import argparse
import json
import statistics
import time

import torch
from torch.nn.functional import cross_entropy

import mooring
from mooring.lab.fleet.fleet import Fleet
from mooring.lab.fleet.precision import computing
from mooring.lab.methods import find
from mooring.lab.networks.inputs import scaled
from mooring.lab.networks.start import start
from mooring.lab.order import task_order
from mooring.lab.spec import RunSpec
from mooring.lab.streams import Split, Stream, Task, digits, permuted

METHODS = ("plain", "explicit-ewc")
WARM = 5
"""Steps before the clock starts."""


def noise(batch: int, steps: int = 40) -> Stream:
    """Two tasks of random images with the shape of CIFAR's: how long a step takes does not depend on what is seen."""
    count = steps * batch
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (2 * count, 3, 32, 32), dtype=torch.uint8, generator=generator)
    split = Split(images, torch.randint(0, 10, (2 * count,), generator=generator))
    parts = [torch.arange(number * count, (number + 1) * count) for number in (0, 1)]
    tasks = tuple(Task(str(number), part, part[:20], tuple(range(10))) for number, part in enumerate(parts))
    return Stream("noise", split, split, tasks, heads="one")


class Clock:
    """Times the steps of the second task, whoever takes them."""

    def __init__(self, device: str) -> None:
        self.device, self.seconds, self.steps = device, 0.0, 0
        self.began: float | None = None

    def step(self, task: int, done: int) -> None:
        """A step is over, the `done`-th of its task."""
        if task == 1 and done >= WARM:
            self.steps = done - WARM
            if done == WARM:
                self.began = self.now()

    def stop(self) -> None:
        """Add what passed since the clock started."""
        self.seconds += self.now() - (self.began or 0.0)

    def now(self) -> float:
        """The time, once the device has done what it was told."""
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()
        return time.perf_counter()

    def look(self, fleet: Fleet) -> None:
        """A fleet took a step."""
        self.step(fleet.position.task, fleet.position.step)
        if fleet.position.task == 1 and fleet.position.step * fleet.common.batch >= len(fleet.stream.tasks[1].train):
            self.stop()

    def harbour(self, fleet: Fleet) -> None:
        """A fleet ended a task."""


def one_by_one(specs: list[RunSpec], stream: Stream, device: str) -> float:
    """Microseconds per run and step, one run after the other."""
    clock = Clock(device)
    images, labels = stream.train.images.to(device), stream.train.labels.to(device)
    for spec in specs:
        method = find(spec.method)
        model = start(spec.network, stream, spec.seed).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=spec.lr, momentum=spec.momentum)
        moor = method.importance and mooring.attach(model, optimizer, importance=method.importance(spec.seed))
        for number, task in enumerate(stream.tasks):
            optimizer.state.clear()
            order = task_order(spec.seed, number, 0, task.train).to(device)
            for done, batch in enumerate(order.split(spec.batch)):
                optimizer.zero_grad()
                cross_entropy(model(scaled(images[batch])), labels[batch]).backward()
                optimizer.step()
                clock.step(number, done + 1)
            if moor:
                moor.consolidate()
        clock.stop()
    return clock.seconds / len(specs) / clock.steps * 1e6


def together(specs: list[RunSpec], stream: Stream, device: str) -> float:
    """Microseconds per run and step of the same training as a fleet."""
    clock = Clock(device)
    Fleet(specs, stream, device=device).sail(clock)
    return clock.seconds / len(specs) / clock.steps * 1e6


def main() -> None:
    """Measure both in turn, several times, and print the ratio of their medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", default="mlp")
    parser.add_argument("--runs", type=int, default=32)
    parser.add_argument("--loop-runs", type=int, help="so many of them one by one; all on a CPU, 2 on a GPU")
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    stream = permuted(digits(), 2) if options.network == "mlp" else noise(options.batch)
    few = options.loop_runs or (options.runs if options.device == "cpu" else 2)
    told = []
    for method in METHODS:
        shared = {"network": options.network, "batch": options.batch, "dtype": options.dtype, "epochs": 1, "lr": 0.001}
        specs = [RunSpec(stream.name, stream.fingerprint, method, seed, **shared) for seed in range(options.runs)]
        loop, fleet = [], []
        with computing(options.dtype):
            for _ in range(options.repeats):
                loop.append(one_by_one(specs[:few], stream, options.device))
                fleet.append(together(specs, stream, options.device))
        pair = statistics.median(loop), statistics.median(fleet)
        told.append({"method": method, "loop_us": pair[0], "fleet_us": pair[1], "ratio": pair[0] / pair[1]})
    if options.json:
        print(json.dumps(told, indent=1))
        return
    where = torch.cuda.get_device_name() if options.device != "cpu" else f"{torch.get_num_threads()} threads"
    print(f"{options.runs} runs of {options.network}, batch {options.batch}, {options.dtype}, {where}")
    print(f"{'a step of a run':14s}{'one by one':>15s}{'fleet':>12s}{'times faster':>14s}")
    for row in told:
        print(f"{row['method']:15s}{row['loop_us']:11.1f} us{row['fleet_us']:9.1f} us{row['ratio']:14.1f}")


if __name__ == "__main__":
    main()
