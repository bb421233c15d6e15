"""Measure a training step with each importance and pull relative to a plain step, in time and peak memory.

Blocks of plain and moored steps alternate in the same run, and the ratio is the median over the turns. Peak memory is
measured in a separate process for each case. On Linux the C allocator is set to keep freed memory, for both kinds of
steps. Otherwise it sometimes returns memory after a step, which changes either time by a tenth (`--allocator default`).

    python benchmarks/overhead.py                  # everything, takes some minutes
    python benchmarks/overhead.py --model cnn6     # one model
    python benchmarks/overhead.py --json           # machine-readable output
"""

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import mooring
from mooring_lab.networks.backbones import CNN6

IMPORTANCES: dict[str, Callable[[], Any]] = {
    "ewc": mooring.EWC,
    "ewc sampled": lambda: mooring.EWC(labels="sampled"),
    "mas": mooring.MAS,
    "si": mooring.SI,
    "rwalk": mooring.RWalk,
    "uniform": mooring.Uniform,
    "random": mooring.Random,
    "balanced ewc": lambda: mooring.Balanced("ewc"),
}
PULLS: dict[str, Callable[[], Any]] = {
    "interpolation": mooring.Interpolation,
    "penalty": lambda: mooring.Penalty(1e-4),
    "proximal": lambda: mooring.Proximal(1.0),
}


KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 30), "MALLOC_MMAP_THRESHOLD_": str(1 << 30)}
"""Environment variables that keep glibc from returning memory; read when a process starts."""


def cnn6() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Return the paper's 6-layer network with 1.2 M parameters, and a batch of 10."""
    model = nn.Sequential(CNN6(), nn.Linear(4096, 10))
    return model, torch.randn(10, 3, 32, 32), torch.randint(10, (10,))


class Transformer(nn.Module):
    """A causal transformer with 25 M parameters, whose embedding is tied to its head."""

    def __init__(self, width: int = 512, depth: int = 7, vocabulary: int = 6000, length: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits of shape (batch, length, vocabulary)."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        x = self.embed(tokens) + self.position
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(x)


def transformer() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Return the transformer and a batch of 8 sequences of 64 tokens."""
    tokens = torch.randint(6000, (8, 65))
    return Transformer(), tokens[:, :-1], tokens[:, 1:]


MODELS = {"cnn6": cnn6, "transformer": transformer}


def trainer(model_name: str, importance: str | None = None, pull: str | None = None) -> Callable[[], None]:
    """Return a training step after a warm-up; with a mooring, one task is already consolidated."""
    torch.manual_seed(0)
    model, inputs, targets = MODELS[model_name]()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    moor = None
    if importance and pull:
        moor = mooring.attach(model, optimizer, importance=IMPORTANCES[importance](), pull=PULLS[pull]())

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs).flatten(0, -2), targets.flatten()).backward()
        optimizer.step()

    step()
    if moor:
        moor.consolidate()
    step()
    return step


def seconds(step: Callable[[], None], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        step()
    return (time.perf_counter() - start) / times


def time_ratio(model: str, importance: str, pull: str, turns: int, block: int) -> tuple[float, float, float]:
    """Return the quartiles over turns of the time of a moored step relative to a plain step."""
    plain, moored = trainer(model), trainer(model, importance, pull)
    ratios = []
    for turn in range(turns):
        first, second = (plain, moored) if turn % 2 else (moored, plain)
        a, b = seconds(first, block), seconds(second, block)
        ratios.append(b / a if turn % 2 else a / b)
    low, middle, high = statistics.quantiles(ratios, n=4)
    return low, middle, high


def peak_bytes(case: tuple[str, str | None, str | None]) -> int:
    """Return the peak memory of a process that only trains this case for a few steps."""
    model, importance, pull = case
    step = trainer(model, importance, pull)
    for _ in range(3):
        step()
    try:  # on Linux, getrusage includes the size of the parent process
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(status["VmHWM"].split()[0]) * 1024
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def memory_of(case: tuple[str, str | None, str | None]) -> int:
    """Return `peak_bytes` of a new process with the default allocator."""
    for key in KEEP_MEMORY:
        os.environ.pop(key, None)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(peak_bytes, (case,))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, action="append", help="default: all")
    parser.add_argument("--importance", choices=IMPORTANCES, action="append", help="default: all")
    parser.add_argument("--pull", choices=PULLS, action="append", help="default: all")
    parser.add_argument("--turns", type=int, default=0, help="turns of plain and moored blocks (default: by model)")
    parser.add_argument("--no-memory", action="store_true", help="leave out peak memory")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of tables")
    parser.add_argument("--allocator", choices=["keeping", "default"], default="keeping", help="see above")
    options = parser.parse_args()
    if options.allocator == "keeping" and not KEEP_MEMORY.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **KEEP_MEMORY})
    rows = []
    for model in options.model or MODELS:
        parameters = sum(p.numel() for p in MODELS[model]()[0].parameters())
        turns, block = (options.turns or 15, 5) if model == "cnn6" else (options.turns or 5, 1)
        plain_peak = 0 if options.no_memory else memory_of((model, None, None))
        if not options.json:
            print(
                f"\n{model}: {parameters / 1e6:.1f} M parameters, SGD with momentum, {torch.get_num_threads()} threads"
            )
            heads = ("time / plain", "quartiles", "peak / plain", "model sizes")
            print(f"{'importance':14s}{'pull':15s}" + "".join(head.rjust(14) for head in heads))
        for importance in options.importance or IMPORTANCES:
            for pull in options.pull or PULLS:
                low, ratio, high = time_ratio(model, importance, pull, turns, block)
                row: dict[str, Any] = {"model": model, "importance": importance, "pull": pull}
                row |= {"time_ratio": ratio, "time_quartiles": [low, high]}
                if not options.no_memory:
                    peak = memory_of((model, importance, pull))
                    row |= {"memory_ratio": peak / plain_peak, "model_sizes": (peak - plain_peak) / parameters / 4}
                rows.append(row)
                if not options.json:
                    print(f"{importance:14s}{pull:15s}{ratio:14.3f}{low:8.3f}-{high:.3f}", end="")
                    print(f"{row['memory_ratio']:14.2f}{row['model_sizes']:14.1f}" if "model_sizes" in row else "")
    if options.json:
        print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
