"""Measure a training step of LoRA moored through its product, relative to a plain one, in time and peak memory.

The models have random weights and the shapes of GPT-2 (124 M) and of a Llama of 1.1 B. Blocks of plain and moored steps
alternate in one process, and the ratio is the median over the turns. Each turn is as long as the interval in which
training observes layers, or a multiple of it, so that the ratio contains that. Peak memory is measured in turns of its
own, relative to the peak of plain steps. The budget is so small that it is spent: "active" is the part of the turns
after which the pull acted.

    python benchmarks/adapter_cost.py --device cuda                       # both models, PEFT's targets and all layers
    python benchmarks/adapter_cost.py --device cuda --model gpt2 --json
    python benchmarks/adapter_cost.py --device cuda --budgets default     # without the other two budgets
    python benchmarks/adapter_cost.py --tiny                              # in miniature, on a CPU
"""

import argparse
import json
import statistics
import time
from itertools import product
from typing import Any

import torch
from finetuning.models import LLAMA_1B, LLAMA_TINY, gpt2, llama, with_adapters
from torch import nn

import mooring
from mooring.curvature import Product
from mooring.state.mooring_state import PRODUCT_EVERY

BATCHES = {"gpt2": (8, 1024), "llama": (4, 1024)}
"""The sequences of a batch and their tokens."""

TARGETS = {
    "gpt2": {"default": ["c_attn"], "all": "all-linear"},
    "llama": {"default": ["q_proj", "v_proj"], "all": "all-linear"},
}
"""The layers that PEFT adapts by default, and all of them."""


NATS = 1e-6

BUDGETS: dict[str, dict[str, Any]] = {
    "estimated": {"measured": False},
    "no distillation": {"distil": False},
    "default": {},
    "every step": {"distil": True},
}
"""Options of a budget: estimated only, or measured with distillation in no step, in some, or in every one."""


def base_model(name: str, dtype: torch.dtype, device: torch.device, *, tiny: bool) -> nn.Module:
    """Return a language model with random weights."""
    torch.manual_seed(0)
    if name == "gpt2":
        return gpt2(tiny, dropout=0.1).to(device, dtype)
    return llama(LLAMA_TINY if tiny else LLAMA_1B, 100 if tiny else 32000, 4).to(device, dtype)


class Training:
    """LoRA of a model with random weights, plain or moored.

    Args:
        given: the options of the command line.
        name: the model's.
        targets: the layers to adapt.
        rank: the rank of the adapters.
        budget: the options of the budget that they are moored with; None for plain training.
    """

    def __init__(
        self, given: argparse.Namespace, name: str, targets: Any, rank: int, budget: dict[str, Any] | None
    ) -> None:
        self.device = torch.device(given.device)
        self.base = base_model(name, given.dtype, self.device, tiny=given.tiny)
        self.model = with_adapters(self.base, targets, rank, transposed=name == "gpt2")
        adapters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(adapters, lr=1e-3, fused=self.device.type == "cuda")
        self.shape = (2, 16) if given.tiny else BATCHES[name]
        self.vocabulary = 100 if given.tiny else 32000
        self.generator = torch.Generator(self.device).manual_seed(1)
        self.moor: mooring.Mooring | None = None
        self.attach_seconds = 0.0
        if budget is not None:
            self._attach(Product(dtype=given.factors), mooring.Budget(NATS, **budget))

    def batch(self) -> torch.Tensor:
        """Return random tokens."""
        return torch.randint(self.vocabulary, self.shape, generator=self.generator, device=self.device)

    def _attach(self, held: Product, pull: mooring.Budget) -> None:
        reference = [{"input_ids": tokens, "labels": tokens} for tokens in (self.batch() for _ in range(4))]
        start = time.perf_counter()
        self.moor = mooring.attach(
            self.model, self.optimizer, reference=reference, adapters=held, pull=pull, progress=False
        )
        self.wait()
        self.attach_seconds = time.perf_counter() - start

    def step(self) -> None:
        """Take one training step."""
        tokens = self.batch()
        self.optimizer.zero_grad()
        self.model(input_ids=tokens, labels=tokens).loss.backward()
        self.optimizer.step()

    def wait(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, steps: int) -> float:
        """Return the mean time of some steps."""
        self.wait()
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        self.wait()
        return (time.perf_counter() - start) / steps

    def pull_acts(self) -> bool:
        """Return whether the budget is spent, so that the last step pulled."""
        solver = self.moor._step.budget if self.moor is not None else None
        return solver is not None and bool(solver.mu > 0)

    def peak_bytes(self, steps: int) -> int:
        """Return the largest memory that is in use during some steps; 0 on a CPU."""
        if self.device.type != "cuda":
            return 0
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        self.seconds(steps)
        return torch.cuda.max_memory_allocated(self.device)


def alternate(plain: Training, moored: Training, turns: int, block: int) -> tuple[float, float, float]:
    """Return the median time of a plain step, the median ratio of a moored one to it, and how often the pull acted."""
    times, ratios, active = [], [], 0
    for turn in range(turns):
        if turn % 2:
            a, b = plain.seconds(block), moored.seconds(block)
        else:
            b, a = moored.seconds(block), plain.seconds(block)
        times.append(a)
        ratios.append(b / a)
        active += moored.pull_acts()
    return statistics.median(times), statistics.median(ratios), active / turns


def measure(given: argparse.Namespace, name: str, targets: str, rank: int, budget: str) -> dict[str, Any]:
    """Return the cost of a moored step of one model; only one model is in memory while its peak is measured."""
    layers = TARGETS[name][targets]
    plain = Training(given, name, layers, rank, None)
    plain.seconds(given.warmup)
    plain_peak = plain.peak_bytes(2)
    moored = Training(given, name, layers, rank, BUDGETS[budget])
    assert moored.moor is not None
    moored.seconds(given.warmup)
    plain_seconds, ratio, active = alternate(plain, moored, given.turns, given.block)
    products = len(moored.moor.coverage().held) // 2
    del plain
    peak = moored.peak_bytes(given.block)
    return {
        "model": name,
        "targets": targets,
        "rank": rank,
        "budget": budget,
        "products": products,
        "plain_ms": 1e3 * plain_seconds,
        "ratio": ratio,
        "attach_steps": moored.attach_seconds / plain_seconds,
        "plain_peak_mib": plain_peak / 2**20,
        "peak_mib": peak / 2**20,
        "kept_mib": sum(t.nbytes for key, t in moored.moor.state_dict().items() if key != "mooring") / 2**20,
        "active": active,
    }


def line(row: dict[str, Any]) -> str:
    """Return the results of one case in a line."""
    return (
        f"{row['model']:6s} {row['targets']:8s} r={row['rank']:<3d} {row['products']:4d} products {row['budget']:15s}"
        f"   plain {row['plain_ms']:8.2f} ms   moored {row['ratio']:.3f}   attach {row['attach_steps']:.0f} steps"
        f"   peak {row['peak_mib']:.0f} of {row['plain_peak_mib']:.0f} MiB   kept {row['kept_mib']:.0f} MiB"
        f"   active {row['active']:.2f}"
    )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["gpt2", "llama"], nargs="+", default=["gpt2", "llama"])
    parser.add_argument("--targets", choices=["default", "all"], nargs="+", default=["default", "all"])
    parser.add_argument("--rank", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--budgets", choices=list(BUDGETS), nargs="+", default=list(BUDGETS)[:3])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default=None, help="of the base model: bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--factors", default=None, help="the dtype in which factors are kept")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--block", type=int, default=PRODUCT_EVERY, help="steps in a turn")
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--tiny", action="store_true", help="small models, to see that it runs")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    given.dtype = getattr(torch, given.dtype or ("bfloat16" if given.device.startswith("cuda") else "float32"))
    given.factors = given.factors and getattr(torch, given.factors)
    return given


def main(arguments: list[str] | None = None) -> int:
    """Measure every case and print the results."""
    given, rows = parse(arguments), []
    for name in given.model:
        for targets in given.targets:
            for rank, budget in product(given.rank, given.budgets):
                row = measure(given, name, targets, rank, budget)
                rows.append(row)
                if not given.json:
                    print(line(row), flush=True)
    if given.json:
        print(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    main()
