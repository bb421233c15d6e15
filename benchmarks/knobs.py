"""Measure the effect of each fine-tuning option: old and new accuracy, mean over seeds.

The data are the digits of `examples/finetune.py`.

    python benchmarks/knobs.py
    python benchmarks/knobs.py --seeds 10 --json
"""

import argparse
import json
import statistics
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import mooring
from mooring import Budget, Interpolation
from mooring.importance import Kronecker

SETTINGS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "the default, Budget(0.1)": {},
    "Budget(0.3)": {"pull": Budget(0.3)},
    "Budget(0.01)": {"pull": Budget(0.01)},
    "Budget(0.001)": {"pull": Budget(0.001)},
    "Interpolation()": {"pull": Interpolation()},
    "Kronecker()": {"importance": Kronecker()},
    "Kronecker(), Budget(0.01)": {"importance": Kronecker(), "pull": Budget(0.01)},
    "Kronecker(), Budget(0.001)": {"importance": Kronecker(), "pull": Budget(0.001)},
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, epochs: int) -> None:
    """Train on the first 1400 digits."""
    for batch in torch.cat([torch.randperm(1400) for _ in range(epochs)]).split(20):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()


def finetune(options: dict[str, Any] | None, seed: int, epochs: int) -> tuple[float, float]:
    """Fine-tune a network from upright to rotated digits; return its accuracy on both, in percent."""
    images, labels = load_digits(return_X_y=True)
    upright, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    rotated = upright.view(-1, 8, 8).rot90(1, (1, 2)).flatten(1)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
    train(model, torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9), upright, y, epochs)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    if options is not None:
        mooring.attach(model, optimizer, reference=upright[:640].split(20), progress=False, **options)
    train(model, optimizer, rotated, y, epochs)
    old, new = (100 * (model(x[1400:]).argmax(1) == y[1400:]).float().mean().item() for x in (upright, rotated))
    return old, new


def main(arguments: list[str] | None = None) -> None:
    """Measure every setting and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    results = {}
    for name, options in SETTINGS.items():
        runs = [finetune(options, seed, given.epochs) for seed in range(given.seeds)]
        old, new = (statistics.mean(values) for values in zip(*runs, strict=True))
        results[name] = {"old": old, "new": new}
        if not given.json:
            print(f"{name:28s} old {old:5.1f} %   new {new:5.1f} %", flush=True)
    if given.json:
        print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
