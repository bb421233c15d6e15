"""Upright digits and the same on their side, a network that knows the first, and the comparison of settings on them."""

import argparse
import json
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

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


Options = dict[str, Any] | None
"""Options of `mooring.attach`; None for plain training."""


def compare_settings(
    settings: Mapping[str, Options],
    finetune: Callable[[Options, int, int], tuple[float, float]],
    arguments: list[str] | None,
    *,
    description: str | None,
    epochs: int,
    before: Callable[[int], float] | None = None,
) -> None:
    """Print the accuracy on old and new digits for each setting, mean over seeds.

    Args:
        settings: by their name.
        finetune: takes a setting, a seed and the epochs; returns both accuracies in percent.
        arguments: of the command line.
        description: of the command line's help.
        epochs: the default of its --epochs.
        before: returns the accuracy on old digits before fine-tuning, of a seed, for a first line.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=epochs)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    results: dict[str, dict[str, float]] = {}
    if before is not None:
        results["before"] = {"old": statistics.mean(before(seed) for seed in range(given.seeds))}
        if not given.json:
            print(f"{'before':28s} old {results['before']['old']:5.1f} %", flush=True)
    for name, options in settings.items():
        runs = [finetune(options, seed, given.epochs) for seed in range(given.seeds)]
        old, new = (statistics.mean(values) for values in zip(*runs, strict=True))
        results[name] = {"old": old, "new": new}
        if not given.json:
            print(f"{name:28s} old {old:5.1f} %   new {new:5.1f} %", flush=True)
    if given.json:
        print(json.dumps(results, indent=1))
