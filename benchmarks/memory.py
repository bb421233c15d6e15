"""What each form of `mooring.Memory` keeps for a parameter, in bytes, and what it costs in time over the full form.

Bytes are those of the tensors in the state, on the device and on the host; on a GPU also what its allocator has more of
than before, staging and all. Times are ratios of two things measured in turns in the same run: of the update, with an
optimizer that stands still and gradients that lie ready, and of a whole training step.

    python benchmarks/memory.py                     # on a GPU where there is one
    python benchmarks/memory.py --dtype bfloat16    # of the parameters
    python benchmarks/memory.py --json              # for machines
    python benchmarks/memory.py anchors             # what anchors that are narrower than parameters do
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


class Still(torch.optim.SGD):
    """SGD that leaves everything where it is while `still`."""

    still = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Nothing, or SGD's."""
        return None if self.still else super().step(closure)


class Trainer:
    """A stack of linear layers, moored in one form, in the second task."""

    def __init__(self, told: argparse.Namespace, mode: str, device: str) -> None:
        torch.manual_seed(0)
        dtype = getattr(torch, told.dtype)
        layers = [each for _ in range(told.layers) for each in (nn.Linear(told.side, told.side), nn.ReLU())]
        self.model = nn.Sequential(*layers).to(device, dtype)
        self.x = torch.randn(told.batch, told.side, device=device).to(dtype)
        self.optimizer = Still(self.model.parameters(), lr=1e-3)
        pull = Proximal(1.0) if "none" in MODES[mode].values() else Interpolation()
        self.step()
        before = torch.cuda.memory_allocated() if device == "cuda" else 0
        memory = Memory(**MODES[mode], staging=told.staging)
        options: dict[str, Any] = {"pull": pull, "memory": memory, "check_finite": False}
        self.moor = mooring.attach(self.model, self.optimizer, importance=mooring.EWC(), **options)
        self.moor.consolidate(data=[self.x], loss=lambda model, x: model(x).square().mean())
        self.step()
        gc.collect()
        self.allocated = torch.cuda.memory_allocated() - before if device == "cuda" else None

    def step(self) -> None:
        """One training step."""
        self.optimizer.still = False
        self.optimizer.zero_grad()
        self.model(self.x).square().mean().backward()
        self.optimizer.step()

    def update(self) -> None:
        """The mooring's part of it."""
        self.optimizer.still = True
        self.optimizer.step()

    def bytes(self) -> dict[str, float]:
        """For each parameter, by slot, and in all on the device and on the host."""
        count = sum(p.numel() for p in self.model.parameters())
        found = dict.fromkeys(("anchor", "previous", "current", "device", "host"), 0.0)
        for name, tensor in self.moor.state_dict().items():
            slot = name.partition(".")[0].partition("_")[0]
            if slot in found:
                each = tensor.numel() * tensor.element_size() / count
                found[slot] += each
                found["host" if slot == "anchor" and self.moor._states.memory.host else "device"] += each
        return found


def seconds(work: Callable[[], None], times: int, device: str) -> float:
    """Of one call, of some together; the host may run ahead, as it does in training."""
    begin = time.perf_counter()
    for _ in range(times):
        work()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / times


def ratio(one: Callable[[], None], other: Callable[[], None], told: argparse.Namespace, device: str) -> float:
    """The median over turns of both, one after the other."""
    for work in (one, other):
        seconds(work, 3, device)
    turns = [(seconds(one, told.times, device), seconds(other, told.times, device)) for _ in range(told.turns)]
    return statistics.median(a / b for a, b in turns)


def modes(told: argparse.Namespace) -> None:
    """The table of bytes and times."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    full = Trainer(told, "full", device)
    count = sum(p.numel() for p in full.model.parameters())
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    if not told.json:
        print(f"{name}, torch {torch.__version__}: {count / 1e6:.1f} M {told.dtype} parameters, batch {told.batch}")
        print(
            f"{'bytes for each parameter:':26} anchor previous current | device  host allocated | update  step / full"
        )
    rows = []
    for mode in MODES:
        this = Trainer(told, mode, device)
        row: dict[str, Any] = {"mode": mode, **this.bytes()}
        row["allocated"] = None if this.allocated is None else this.allocated / count
        row["update"] = ratio(this.update, full.update, told, device)
        row["step"] = ratio(this.step, full.step, told, device)
        rows.append(row)
        if not told.json:
            print(line(row), flush=True)
        del this
        gc.collect()
    if told.json:
        head = {"device": name, "torch": torch.__version__, "parameters": count, **vars(told)}
        print(json.dumps({**head, "rows": rows}, indent=1))


def line(row: dict[str, Any]) -> str:
    """One mode's, of the table."""
    slots = f"{row['anchor']:6.2f} {row['previous']:8.2f} {row['current']:7.2f}"
    allocated = "" if row["allocated"] is None else f"{row['allocated']:.2f}"
    places = f"{row['device']:6.2f} {row['host']:5.2f} {allocated:>9}"
    return f"{row['mode']:26} {slots} | {places} | {row['update']:6.2f} {row['step']:5.2f}"


def anchors(told: argparse.Namespace) -> None:
    """A network of the digits fine-tuned to digits that lie on their side, with anchors in float32 and narrower."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    upright, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    turned = upright.view(-1, 8, 8).rot90(1, (1, 2)).flatten(1)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, epochs: int) -> None:
        for batch in torch.cat([torch.randperm(1400) for _ in range(epochs)]).split(20):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()

    pulls = {"interpolation": Interpolation(), "proximal 1e4": Proximal(1e4)}
    pulls |= {f"budget {nats:g}": Budget(nats) for nats in (0.1, 1e-3, 1e-5)}
    print(f"means over {told.turns} seeds")
    print(f"{'pull':14} {'anchors':9} {'spent by rounding':>18} {'upright %':>10} {'turned %':>9}")
    for name, pull in pulls.items():
        for dtype in (torch.float32, HALF):
            found = []
            for seed in range(told.turns):
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
                train(model, optimizer, turned, 10)
                right = [100 * (model(x[1400:]).argmax(1) == y[1400:]).float().mean().item() for x in (upright, turned)]
                found.append((spent, *right))
            spent, kept, new = (statistics.mean(each) for each in zip(*found, strict=True))
            print(f"{name:14} {str(dtype).removeprefix('torch.'):9} {spent:18.2e} {kept:10.1f} {new:9.1f}")


def main(arguments: list[str] | None = None) -> int:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["modes", "anchors"], default="modes")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of parameters")
    parser.add_argument("--side", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--staging", type=int, default=1 << 28, help="bytes")
    parser.add_argument("--times", type=int, default=5, help="calls in a turn")
    parser.add_argument("--turns", type=int, default=7, help="turns, or seeds")
    parser.add_argument("--json", action="store_true")
    told = parser.parse_args(arguments)
    {"modes": modes, "anchors": anchors}[told.what](told)
    return 0


if __name__ == "__main__":
    sys.exit(main())
