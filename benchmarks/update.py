"""What a mooring's own update costs on a GPU: importance and pull over all parameters, nothing else.

The optimizer stands still and gradients lie ready, so that what is timed is the mooring's alone. Each time stands
beside two others of the same run: the bytes that the update must move at the speed at which this GPU copies, and one
step of torch's fused AdamW on the same parameters.

    python benchmarks/update.py                          # 64 matrices of 2048 x 2048: 268 M parameters
    python benchmarks/update.py --tensors 2000 --side 32 # many small ones, where launches dominate
    python benchmarks/update.py --json                   # for machines
"""

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

import mooring
from mooring.importance import Importance
from mooring.observe.output_observer import Observation
from mooring.pulls import Budget, Pull

CASES: dict[str, tuple[Callable[[], Importance], Callable[[], Pull], int]] = {
    "explicit EWC": (mooring.EWC, mooring.Interpolation, 28),
    "explicit MAS": (mooring.MAS, mooring.Interpolation, 28),
    "explicit SI": (mooring.SI, mooring.Interpolation, 44),
    "explicit RWalk": (mooring.RWalk, mooring.Interpolation, 52),
    "penalty EWC": (mooring.EWC, lambda: mooring.Penalty(1.0), 32),
    "proximal EWC": (mooring.EWC, lambda: mooring.Proximal(1.0), 28),
    "budget, kept": (lambda: mooring.EWC(decay=None, per_sample=True, batch_size=1), lambda: Budget(1e9), 24),
    "budget, one look": (lambda: mooring.EWC(decay=None, per_sample=True, batch_size=1), lambda: shrinking(0.97), 40),
    "budget, two looks": (lambda: mooring.EWC(decay=None, per_sample=True, batch_size=1), lambda: shrinking(0.8), 52),
}
"""An importance, a pull, and the bytes of each float32 parameter that must go through memory.

EWC with the explicit step reads parameter, gradient, anchor, previous and current, and writes parameter and
current: 7 times 4 bytes. SI keeps the parameter before the step (8 more) and its path (8 more); RWalk a Fisher beside
(8 more). A penalty reads four and writes the gradient that the optimizer is handed (20), then updates current (12). A
budget updates current (12), and sums what was spent (12); where it is spent, it pulls (16), after a second look (12)
where its multiplier has changed much. While parameters stand still, a budget is spent in each step if it shrinks.
"""


@dataclass(frozen=True)
class Shrinking(Budget):
    """A budget of which only a share is left in each step."""

    share: float = 1.0

    def allowed(self, task: int, groups: int = 1) -> Tensor:
        """What is left of it."""
        assert isinstance(self.nats, Tensor)
        return self.nats.mul_(self.share)


def shrinking(share: float) -> Shrinking:
    """A thousandth of a nat to begin with."""
    return Shrinking(torch.tensor(1e-3, dtype=torch.float64, device="cuda"), share=share)


class Still(torch.optim.Optimizer):
    """An optimizer that leaves everything where it is."""

    __module__ = "torch.optim.still"  # of torch's own it is known that they leave gradients alone: no copies are made

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        """Nothing."""


class Ready:
    """Stands in for a watch of the outputs: gradients of the probe lie ready."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.seen = Observation(32, {p: torch.randn_like(p) for p in parameters})

    def collect(self, instead: int = 0) -> Observation:
        """What the forward passes showed, which is never nothing: others are not asked."""
        return self.seen

    def discard(self) -> None:
        """Nothing to forget."""

    def remove(self) -> None:
        """Nothing to remove."""


def milliseconds(work: Callable[[], None], times: int) -> float:
    """The median time on the device; the host may run ahead, as it does in training."""
    for _ in range(3):
        work()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairwise(marks))


def copy_speed(times: int) -> float:
    """Bytes in a millisecond, read and written together, of one large copy."""
    source = torch.empty(1 << 28, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / milliseconds(lambda: target.copy_(source), times)


def measured(name: str, tensors: int, side: int, dtype: torch.dtype, times: int) -> float:
    """The time of one update in the second task."""
    make_importance, make_pull, _ = CASES[name]
    model = nn.ParameterList(nn.Parameter(torch.randn(side, side, device="cuda", dtype=dtype)) for _ in range(tensors))
    for p in model:
        p.grad = torch.randn_like(p)
    optimizer = Still(model.parameters())
    moor = mooring.attach(model, optimizer, importance=make_importance(), pull=make_pull(), check_finite=False)
    if moor._watch is not None:
        moor._watch.remove()
        moor._step.watch = Ready(list(model))  # type: ignore[assignment]
    optimizer.step()
    moor.consolidate()
    with torch.no_grad():
        for p in model:
            p.add_(1e-3 * torch.randn_like(p))
    return milliseconds(optimizer.step, times)


def adamw(tensors: int, side: int, dtype: torch.dtype, times: int) -> float:
    """The time of one step of torch's fused AdamW."""
    parameters: list[Tensor] = []
    for _ in range(tensors):
        p = nn.Parameter(torch.randn(side, side, device="cuda", dtype=dtype))
        p.grad = torch.randn_like(p)
        parameters.append(p)
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
    return milliseconds(lambda: optimizer.step() and None, times)


def main() -> None:
    """Measure, and print ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=64)
    parser.add_argument("--side", type=int, default=2048)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of parameters")
    parser.add_argument("--times", type=int, default=30)
    parser.add_argument("--cases", default=";".join(CASES), help="names with semicolons")
    parser.add_argument("--json", action="store_true")
    told = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU here: benchmarks/overhead.py measures on a CPU")
    dtype = getattr(torch, told.dtype)
    count, speed = told.tensors * told.side**2, copy_speed(told.times)
    beside = adamw(told.tensors, told.side, dtype, told.times)
    rows = []
    for name in told.cases.split(";"):
        taken = measured(name, told.tensors, told.side, dtype, told.times)
        limit = CASES[name][2] * count / speed if dtype == torch.float32 else None
        rows.append({"case": name, "ms": taken, "limit ms": limit, "AdamW ms": beside})
    explicit = next((row["ms"] for row in rows if row["case"] == "explicit EWC"), None)
    head = {"device": torch.cuda.get_device_name(), "parameters": count, "tensors": told.tensors, "dtype": told.dtype}
    if told.json:
        print(json.dumps({**head, "copy GB/s": speed / 1e6, "rows": rows}, indent=1))
        return
    size = f"{count / 1e6:.0f} M {told.dtype} parameters in {told.tensors} tensors"
    print(f"{head['device']}: {size}; copies {speed / 1e6:.0f} GB/s")
    print(f"{'':18} {'ms':>8} {'over the limit':>15} {'over AdamW':>11} {'over explicit EWC':>18}")
    for row in rows:
        over = "" if row["limit ms"] is None else f"{row['ms'] / row['limit ms']:.2f}"
        against = "" if explicit is None else f"{row['ms'] / explicit:.2f}"
        print(f"{row['case']:18} {row['ms']:8.3f} {over:>15} {row['ms'] / beside:11.2f} {against:>18}")
    print(f"{'fused AdamW':18} {beside:8.3f}")


if __name__ == "__main__":
    main()
