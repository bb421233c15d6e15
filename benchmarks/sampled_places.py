"""Compute Kronecker factors from a part of the pixels: what that saves, and what it changes; mean over seeds.

A small network learns upright digits, enlarged to 24 x 24 pixels, and is then fine-tuned on digits on their side under
a budget. The error is that of the estimated rise of the loss after fine-tuning, relative to the estimate from all
pixels. The budget does not hold here, because the same outputs are trained on other inputs: compare rows only.

    python benchmarks/sampled_places.py --seeds 3 --json results.json
"""

import argparse
import copy
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import mooring
from mooring.rules import Kronecker

PLACES = (None, 144, 64, 16, 4, 1)
REFERENCE = 640
"""The digits that the reference has, in batches of 20."""

TRAINED = 1400
"""The digits that are trained on; the others are tested."""


def digits() -> tuple[Tensor, Tensor, Tensor]:
    """Return upright digits, the same on their side, and the labels."""
    images, labels = load_digits(return_X_y=True)
    upright = torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    upright = nn.functional.interpolate(upright, scale_factor=3, mode="bilinear")
    return upright, upright.rot90(1, (2, 3)), torch.tensor(labels)


def network() -> nn.Module:
    """Return a small network with a plain, a depthwise and a 1 x 1 convolution."""
    depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16)
    layers = [nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), depthwise, nn.Conv2d(16, 32, 1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(
        *layers, nn.Conv2d(32, 32, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 10)
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, epochs: int) -> None:
    """Train in batches of 20."""
    for batch in torch.cat([torch.randperm(TRAINED) for _ in range(epochs)]).split(20):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the test accuracy in percent."""
    return 100 * (model(x[TRAINED:]).argmax(1) == y[TRAINED:]).float().mean().item()


def sgd(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Return the optimizer."""
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def run(base: nn.Module, places: int | None, seed: int, epochs: int) -> dict[str, float]:
    """Fine-tune with factors from so many places; return accuracies, the error of the estimate and times."""
    upright, rotated, y = digits()
    torch.manual_seed(100 + seed)
    model, reference = copy.deepcopy(base), upright[:REFERENCE].split(20)
    optimizer = sgd(model, 0.01)
    options: dict[str, Any] = {"pull": mooring.Budget(0.1), "progress": False, "reference": reference}
    start = time.perf_counter()
    moor = mooring.attach(model, optimizer, importance=Kronecker(places=places), **options)
    seconds = time.perf_counter() - start
    train(model, optimizer, rotated, y, epochs)
    own = moor.pull_energy()
    moor.detach()
    tuned = copy.deepcopy(model.state_dict())
    model.load_state_dict(base.state_dict())
    whole = mooring.attach(model, optimizer, importance=Kronecker(), **options)
    model.load_state_dict(tuned)
    error = own / whole.pull_energy() - 1
    whole.detach()
    result = {"old": accuracy(model, upright, y), "new": accuracy(model, rotated, y)}
    return {**result, "error_percent": 100 * error, "attach_seconds": seconds}


def main(arguments: list[str] | None = None) -> None:
    """Measure every number of places and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--places", type=int, nargs="*", help="numbers of places (default: all of them)")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    given = parser.parse_args(arguments)
    upright, _, y = digits()
    bases = []
    for seed in range(given.seeds):
        torch.manual_seed(seed)
        bases.append(network())
        train(bases[-1], sgd(bases[-1], 0.03), upright, y, given.epochs)
    results: dict[str, dict[str, float]] = {}
    for places in (None, *given.places) if given.places else PLACES:
        runs = [run(base, places, seed, given.epochs) for seed, base in enumerate(bases)]
        row = {name: statistics.mean(single[name] for single in runs) for name in runs[0]}
        results[str(places or "all")] = row
        print(f"{places or 'all':>4}", *(f"{name} {value:8.3f}" for name, value in row.items()), sep="  ", flush=True)
    if given.json:
        given.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
