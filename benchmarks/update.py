"""Measure a mooring's own update on a GPU: importance and pull of all parameters, nothing else.

The optimizer does nothing and gradients are already computed, so only the mooring is timed. Each time is compared with
two others of the same run: the time to copy as many bytes as the update must move, and one step of torch's fused AdamW
on the same parameters.

    python benchmarks/update.py                          # 64 matrices of 2048 x 2048: 268 M parameters
    python benchmarks/update.py --tensors 2000 --side 32 # many small tensors, where kernel launches dominate
    python benchmarks/update.py --json                   # machine-readable output
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
from mooring.observe.output_observer import Observation
from mooring.rules import Budget, Importance, Pull

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
"""An importance, a pull, and the memory traffic in bytes per float32 parameter.

EWC with the explicit step reads parameter, gradient, anchor, previous and current, and writes parameter and current: 7
times 4 bytes. SI also keeps the parameter before the step (8 more) and its path (8 more); RWalk keeps a Fisher too (8
more). A penalty reads four tensors and writes the gradient for the optimizer (20), then updates current (12). A budget
updates current (12) and sums its terms (12). If the budget is used up, it pulls (16), after a second sum (12) if its
multiplier has changed much. Because parameters do not move, a budget is used up in each step only if it shrinks.
"""


@dataclass(frozen=True)
class Shrinking(Budget):
    """A budget that shrinks to a share of itself in each step."""

    share: float = 1.0

    def allowed(self, task: int) -> Tensor:
        """Shrink the budget and return it."""
        assert isinstance(self.nats, Tensor)
        return self.nats.mul_(self.share)


def shrinking(share: float) -> Shrinking:
    """Return a shrinking budget that starts at a thousandth of a nat."""
    return Shrinking(torch.tensor(1e-3, dtype=torch.float64, device="cuda"), share=share)


class NoOptimizer(torch.optim.Optimizer):
    """An optimizer that does nothing."""

    __module__ = "torch.optim.still"  # optimizers of torch do not change gradients, so no copies are made

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        """Do nothing."""


class ReadyObserver:
    """A replacement for the output observer, with gradients that are already computed."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.observation = Observation(32, {p: torch.randn_like(p) for p in parameters})

    def collect(self, instead: int = 0) -> Observation:
        """Return the prepared observation."""
        return self.observation

    def discard(self) -> None:
        """Do nothing."""

    def remove(self) -> None:
        """Do nothing."""


def milliseconds(work: Callable[[], None], times: int) -> float:
    """Return the median time on the device; the host may run ahead, as in training."""
    for _ in range(3):
        work()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
    events[0].record()
    for event in events[1:]:
        work()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairwise(events))


def copy_speed(times: int) -> float:
    """Return the bytes per millisecond, read and written together, of one large copy."""
    source = torch.empty(1 << 28, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / milliseconds(lambda: target.copy_(source), times)


def measured(name: str, tensors: int, side: int, dtype: torch.dtype, times: int) -> float:
    """Return the time of one update in the second task, in milliseconds."""
    make_importance, make_pull, _ = CASES[name]
    model = nn.ParameterList(nn.Parameter(torch.randn(side, side, device="cuda", dtype=dtype)) for _ in range(tensors))
    for p in model:
        p.grad = torch.randn_like(p)
    optimizer = NoOptimizer(model.parameters())
    moor = mooring.attach(model, optimizer, importance=make_importance(), pull=make_pull(), check_finite=False)
    if moor._step.outputs is not None:
        moor._step.outputs.remove()
        moor._step.outputs = ReadyObserver(list(model))  # type: ignore[assignment]
    optimizer.step()
    moor.consolidate()
    with torch.no_grad():
        for p in model:
            p.add_(1e-3 * torch.randn_like(p))
    return milliseconds(optimizer.step, times)


def adamw(tensors: int, side: int, dtype: torch.dtype, times: int) -> float:
    """Return the time of one step of torch's fused AdamW, in milliseconds."""
    parameters: list[Tensor] = []
    for _ in range(tensors):
        p = nn.Parameter(torch.randn(side, side, device="cuda", dtype=dtype))
        p.grad = torch.randn_like(p)
        parameters.append(p)
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
    return milliseconds(lambda: optimizer.step() and None, times)


def main() -> None:
    """Measure and print ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=64)
    parser.add_argument("--side", type=int, default=2048)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="dtype of the parameters")
    parser.add_argument("--times", type=int, default=30)
    parser.add_argument("--cases", default=";".join(CASES), help="names separated by semicolons")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a GPU: benchmarks/overhead.py measures on a CPU")
    dtype = getattr(torch, options.dtype)
    count, speed = options.tensors * options.side**2, copy_speed(options.times)
    adamw_ms = adamw(options.tensors, options.side, dtype, options.times)
    rows = []
    for name in options.cases.split(";"):
        ms = measured(name, options.tensors, options.side, dtype, options.times)
        limit = CASES[name][2] * count / speed if dtype == torch.float32 else None
        rows.append({"case": name, "ms": ms, "limit ms": limit, "AdamW ms": adamw_ms})
    explicit = next((row["ms"] for row in rows if row["case"] == "explicit EWC"), None)
    header = {"device": torch.cuda.get_device_name(), "parameters": count}
    header |= {"tensors": options.tensors, "dtype": options.dtype}
    if options.json:
        print(json.dumps({**header, "copy GB/s": speed / 1e6, "rows": rows}, indent=1))
        return
    description = f"{count / 1e6:.0f} M {options.dtype} parameters in {options.tensors} tensors"
    print(f"{header['device']}: {description}; copies {speed / 1e6:.0f} GB/s")
    print(f"{'':18} {'ms':>8} {'over the limit':>15} {'over AdamW':>11} {'over explicit EWC':>18}")
    for row in rows:
        over_limit = "" if row["limit ms"] is None else f"{row['ms'] / row['limit ms']:.2f}"
        over_explicit = "" if explicit is None else f"{row['ms'] / explicit:.2f}"
        print(f"{row['case']:18} {row['ms']:8.3f} {over_limit:>15} {row['ms'] / adamw_ms:11.2f} {over_explicit:>18}")
    print(f"{'fused AdamW':18} {adamw_ms:8.3f}")


if __name__ == "__main__":
    main()
