"""Fine-tune LoRA adapters from upright to rotated digits: what is kept and what is learned, mean over seeds.

A network learns upright digits, then adapters of rank 8 learn digits on their side.

    python benchmarks/adapters.py
    python benchmarks/adapters.py --seeds 10 --json
"""

import argparse
import copy
import json
import statistics
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from sklearn.datasets import load_digits
from torch import Tensor, nn

import mooring
from mooring import Budget
from mooring.adapters import Product

SETTINGS: dict[str, dict[str, Any] | None] = {
    "plain LoRA": None,
    'adapters="parameters"': {"adapters": "parameters"},
    "the default, Budget(0.03)": {},
    "Budget(0.1)": {"pull": Budget(0.1)},
    "Budget(0.01)": {"pull": Budget(0.01)},
    "Budget(0.01, measured=False)": {"pull": Budget(0.01, measured=False)},
    "Product(damping=0)": {"adapters": Product(damping=0.0)},
    "Product(largest=64)": {"adapters": Product(largest=64)},
    "Product(largest=16)": {"adapters": Product(largest=16)},
    "Product(largest=8)": {"adapters": Product(largest=8)},
    "Product(dtype=bfloat16)": {"adapters": Product(dtype=torch.bfloat16)},
    'Product(dtype="8bit")': {"adapters": Product(dtype="8bit")},
}

TRAINED = 1400
"""The digits that are trained on; the others are tested."""


def digits() -> tuple[Tensor, Tensor, Tensor]:
    """Return upright digits, the same on their side, and the labels."""
    images, labels = load_digits(return_X_y=True)
    upright = torch.tensor(images / 16, dtype=torch.float32)
    return upright, upright.view(-1, 8, 8).rot90(1, (1, 2)).flatten(1), torch.tensor(labels)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, epochs: int) -> None:
    """Train in batches of 20."""
    for batch in torch.cat([torch.randperm(TRAINED) for _ in range(epochs)]).split(20):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the test accuracy in percent."""
    with torch.no_grad():
        return 100 * (model(x[TRAINED:]).argmax(1) == y[TRAINED:]).float().mean().item()


def pretrained(seed: int, epochs: int) -> nn.Module:
    """Return a network that knows upright digits."""
    upright, _, y = digits()
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
    train(model, torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9), upright, y, epochs)
    return model


def finetune(base: nn.Module, options: dict[str, Any] | None, seed: int, epochs: int) -> tuple[float, float]:
    """Train adapters on digits on their side; return the accuracy on upright ones and on these, in percent."""
    upright, rotated, y = digits()
    torch.manual_seed(100 + seed)
    model = get_peft_model(copy.deepcopy(base), LoraConfig(r=8, lora_alpha=8, target_modules=["0", "2"]))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01, momentum=0.9)
    moor = None
    if options is not None:
        moor = mooring.attach(model, optimizer, reference=upright[:640].split(20), progress=False, **options)
    train(model, optimizer, rotated, y, epochs)
    if moor is not None and moor.running_forgetting is not None:
        moor.finish()
    return accuracy(model, upright, y), accuracy(model, rotated, y)


def main(arguments: list[str] | None = None) -> None:
    """Measure every setting and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=18)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    bases = [pretrained(seed, 12) for seed in range(given.seeds)]
    upright, _, y = digits()
    before = statistics.mean(accuracy(base, upright, y) for base in bases)
    results: dict[str, dict[str, float]] = {"before": {"old": before}}
    if not given.json:
        print(f"{'before':28s} old {before:5.1f} %", flush=True)
    for name, options in SETTINGS.items():
        runs = [finetune(base, options, seed, given.epochs) for seed, base in enumerate(bases)]
        old, new = (statistics.mean(values) for values in zip(*runs, strict=True))
        results[name] = {"old": old, "new": new}
        if not given.json:
            print(f"{name:28s} old {old:5.1f} %   new {new:5.1f} %", flush=True)
    if given.json:
        print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
