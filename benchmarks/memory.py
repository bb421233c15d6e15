"""Measure each form of `mooring.Memory`: bytes per parameter, and time relative to the full form.

Bytes are those of the state's tensors, on the device and on the host. On a GPU, the additional memory of the allocator
is reported too, staging included. Times are ratios of two measurements that alternate in the same run: of the update
alone, with an optimizer that does nothing and gradients that are already computed, and of a whole training step.

    python benchmarks/memory.py                     # on a GPU if there is one
    python benchmarks/memory.py --dtype bfloat16    # the dtype of the parameters
    python benchmarks/memory.py --json              # machine-readable output
    python benchmarks/memory.py anchors             # the effect of anchors in bfloat16
"""

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import mooring
from mooring import Budget, Interpolation, Memory, Proximal

HALF = torch.bfloat16
MODES: dict[str, dict[str, Any]] = {
    "full": {},
    "bf16 importance": {"previous": HALF, "current": HALF},
    "bf16": {"anchor": HALF, "previous": HALF, "current": HALF},
    "8-bit": {"previous": "8bit"},
    "8-bit, bf16 current": {"previous": "8bit", "current": HALF},
    "host": {"host": True},
    "8-bit, bf16 current, host": {"previous": "8bit", "current": HALF, "host": True},
    "8-bit, no current": {"previous": "8bit", "current": "none"},
    "8-bit, no current, host": {"previous": "8bit", "current": "none", "host": True},
}


class FreezableSGD(torch.optim.SGD):
    """SGD whose step does nothing while `frozen` is set."""

    frozen = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Do nothing if frozen, else take SGD's step."""
        return None if self.frozen else super().step(closure)


class Trainer:
    """A stack of linear layers with a mooring in one form of memory, in the second task."""

    def __init__(self, options: argparse.Namespace, mode: str, device: str) -> None:
        torch.manual_seed(0)
        dtype = getattr(torch, options.dtype)
        layers = [layer for _ in range(options.layers) for layer in (nn.Linear(options.side, options.side), nn.ReLU())]
        self.model = nn.Sequential(*layers).to(device, dtype)
        self.x = torch.randn(options.batch, options.side, device=device).to(dtype)
        self.optimizer = FreezableSGD(self.model.parameters(), lr=1e-3)
        pull = Proximal(1.0) if "none" in MODES[mode].values() else Interpolation()
        self.step()
        before = torch.cuda.memory_allocated() if device == "cuda" else 0
        memory = Memory(**MODES[mode], staging=options.staging)
        attach_options: dict[str, Any] = {"pull": pull, "memory": memory, "check_finite": False}
        self.moor = mooring.attach(self.model, self.optimizer, importance=mooring.EWC(), **attach_options)
        self.moor.consolidate(data=[self.x], loss=lambda model, x: model(x).square().mean())
        self.step()
        gc.collect()
        self.allocated = torch.cuda.memory_allocated() - before if device == "cuda" else None

    def step(self) -> None:
        """Take one training step."""
        self.optimizer.frozen = False
        self.optimizer.zero_grad()
        self.model(self.x).square().mean().backward()
        self.optimizer.step()

    def update(self) -> None:
        """Run the mooring's part of a training step."""
        self.optimizer.frozen = True
        self.optimizer.step()

    def bytes(self) -> dict[str, float]:
        """Return the bytes per parameter by slot, and in total on the device and on the host."""
        count = sum(p.numel() for p in self.model.parameters())
        sizes = dict.fromkeys(("anchor", "previous", "current", "device", "host"), 0.0)
        for name, tensor in self.moor.state_dict().items():
            slot = name.partition(".")[0].partition("_")[0]
            if slot in sizes:
                size = tensor.numel() * tensor.element_size() / count
                sizes[slot] += size
                sizes["host" if slot == "anchor" and self.moor._states.memory.host else "device"] += size
        return sizes


def seconds(work: Callable[[], None], times: int, device: str) -> float:
    """Return the mean time of a call; the host may run ahead of the device, as in training."""
    start = time.perf_counter()
    for _ in range(times):
        work()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / times


def ratio(one: Callable[[], None], other: Callable[[], None], options: argparse.Namespace, device: str) -> float:
    """Return the median ratio over turns in which both are measured."""
    for work in (one, other):
        seconds(work, 3, device)
    turns = [(seconds(one, options.times, device), seconds(other, options.times, device)) for _ in range(options.turns)]
    return statistics.median(a / b for a, b in turns)


def modes(options: argparse.Namespace) -> None:
    """Print the table of bytes and times."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    full = Trainer(options, "full", device)
    count = sum(p.numel() for p in full.model.parameters())
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    if not options.json:
        print(
            f"{name}, torch {torch.__version__}: {count / 1e6:.1f} M {options.dtype} parameters, batch {options.batch}"
        )
        print(
            f"{'bytes for _each parameter:':26} anchor previous current | device  host allocated | update  step / full"
        )
    rows = []
    for mode in MODES:
        trainer = Trainer(options, mode, device)
        row: dict[str, Any] = {"mode": mode, **trainer.bytes()}
        row["allocated"] = None if trainer.allocated is None else trainer.allocated / count
        row["update"] = ratio(trainer.update, full.update, options, device)
        row["step"] = ratio(trainer.step, full.step, options, device)
        rows.append(row)
        if not options.json:
            print(line(row), flush=True)
        del trainer
        gc.collect()
    if options.json:
        head = {"device": name, "torch": torch.__version__, "parameters": count, **vars(options)}
        print(json.dumps({**head, "rows": rows}, indent=1))


def line(row: dict[str, Any]) -> str:
    """Return a mode's line of the table."""
    slots = f"{row['anchor']:6.2f} {row['previous']:8.2f} {row['current']:7.2f}"
    allocated = "" if row["allocated"] is None else f"{row['allocated']:.2f}"
    places = f"{row['device']:6.2f} {row['host']:5.2f} {allocated:>9}"
    return f"{row['mode']:26} {slots} | {places} | {row['update']:6.2f} {row['step']:5.2f}"


def anchors(options: argparse.Namespace) -> None:
    """Fine-tune a network from upright to rotated digits, with anchors in float32 and in bfloat16."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    upright, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    rotated = upright.view(-1, 8, 8).rot90(1, (1, 2)).flatten(1)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, epochs: int) -> None:
        for batch in torch.cat([torch.randperm(1400) for _ in range(epochs)]).split(20):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()

    pulls = {"interpolation": Interpolation(), "proximal 1e4": Proximal(1e4)}
    budgets = (0.1, 1e-3, 1e-5)
    pulls |= {f"estimated {nats:g}": Budget(nats, measured=False) for nats in budgets}
    pulls |= {f"measured {nats:g}": Budget(nats) for nats in budgets}
    print(f"means over {options.turns} seeds")
    print(f"{'pull':15} {'anchors':9} {'spent by rounding':>18} {'upright %':>10} {'turned %':>9}")
    for name, pull in pulls.items():
        for dtype in (torch.float32, HALF):
            results = []
            for seed in range(options.turns):
                torch.manual_seed(seed)
                model = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
                train(model, torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9), upright, 10)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
                importance = mooring.EWC(decay=None, per_sample=True)
                data = upright[:640].split(20)
                moor = mooring.attach(
                    model, optimizer, importance=importance, pull=pull, reference=data, memory=Memory(anchor=dtype)
                )
                spent = moor.pull_energy()
                train(model, optimizer, rotated, 10)
                if isinstance(pull, Budget) and pull.measured:
                    moor.finish()
                right = [
                    100 * (model(x[1400:]).argmax(1) == y[1400:]).float().mean().item() for x in (upright, rotated)
                ]
                results.append((spent, *right))
            spent, kept, new = (statistics.mean(values) for values in zip(*results, strict=True))
            print(f"{name:15} {str(dtype).removeprefix('torch.'):9} {spent:18.2e} {kept:10.1f} {new:9.1f}")


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["modes", "anchors"], default="modes")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="dtype of the parameters")
    parser.add_argument("--side", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--staging", type=int, default=1 << 28, help="bytes")
    parser.add_argument("--times", type=int, default=5, help="calls in a turn")
    parser.add_argument("--turns", type=int, default=7, help="turns, or seeds")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    {"modes": modes, "anchors": anchors}[options.what](options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
