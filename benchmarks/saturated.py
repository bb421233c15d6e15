"""Measure budgets on a network that fits its data almost perfectly, where the curvature is almost 0.

A small convolutional network learns the digits, and then the same digits rotated or inverted, with the same outputs and
a reference of labelled batches. The table has the loss on the reference before and after, the estimate of its rise, and
the accuracy on old and new test digits, as means over seeds.

    python benchmarks/saturated.py             # takes three minutes on one core
    python benchmarks/saturated.py --seeds 1
"""

import argparse
from collections.abc import Callable
from statistics import fmean

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import mooring
from mooring_lab.streams import digits

REFERENCE_IMAGES, BATCH_SIZE = 640, 20
"""The number of training images in the reference, and the batch size."""

TASKS: dict[str, Callable[[Tensor], Tensor]] = {"rotated": lambda x: x.rot90(1, (2, 3)), "inverted": lambda x: 1 - x}

SETTINGS = {
    "plain": None,
    "estimated Budget(0.1)": {"pull": mooring.Budget(0.1, measured=False)},
    "the same, Kronecker()": {"pull": mooring.Budget(0.1, measured=False), "importance": mooring.Kronecker()},
    "Interpolation()": {"pull": mooring.Interpolation()},
    "measured Budget(0.1)": {"pull": mooring.Budget(0.1)},
}
"""The options of `mooring.attach`; None for plain fine-tuning."""


def network() -> nn.Module:
    """Return two convolutions and a linear layer for images of 8 by 8."""
    layers = [nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AvgPool2d(2), nn.Flatten(), nn.Linear(512, 10))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, epochs: int) -> None:
    """Train with cross entropy in small batches."""
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(BATCH_SIZE):
            optimizer.zero_grad()
            cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()


@torch.no_grad()
def evaluate(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
    """Return the loss, and the accuracy in percent."""
    logits = model(x)
    return cross_entropy(logits, y).item(), 100 * (logits.argmax(1) == y).float().mean().item()


def run(task: str, options: dict[str, object] | None, seed: int) -> tuple[float, ...]:
    """Return the loss on the reference before and after, the estimate of its rise, and old and new accuracy."""
    torch.manual_seed(seed)
    data = digits()
    x, y = data.train.images.float() / 255, data.train.labels
    test, labels = data.test.images.float() / 255, data.test.labels
    model = network()
    train(model, torch.optim.SGD(model.parameters(), 0.02, momentum=0.9), x, y, epochs=10)
    before, _ = evaluate(model, x[:REFERENCE_IMAGES], y[:REFERENCE_IMAGES])
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    reference = list(zip(x[:REFERENCE_IMAGES].split(BATCH_SIZE), y[:REFERENCE_IMAGES].split(BATCH_SIZE), strict=True))
    moor = None if options is None else mooring.attach(model, optimizer, reference=reference, **options)  # type: ignore[arg-type]
    transform = TASKS[task]
    train(model, optimizer, transform(x), y, epochs=3)
    if moor is not None and isinstance(moor.pull, mooring.Budget) and moor.pull.measured:
        moor.finish()
    after, _ = evaluate(model, x[:REFERENCE_IMAGES], y[:REFERENCE_IMAGES])
    estimate = 0.0 if moor is None else moor.pull_energy()
    return before, after, estimate, evaluate(model, test, labels)[1], evaluate(model, transform(test), labels)[1]


def main() -> None:
    """Print a row for each task and setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    seeds = parser.parse_args().seeds
    print(f"{'new data':10}{'held by':26}{'loss on the reference':>24}{'estimated':>11}{'old %':>8}{'new %':>8}")
    for task in TASKS:
        for name, options in SETTINGS.items():
            results = zip(*(run(task, options, seed) for seed in range(seeds)), strict=True)
            before, after, estimate, old, new = (fmean(values) for values in results)
            losses = f"{before:.3f} -> {after:.3f}"
            print(f"{task:10}{name:26}{losses:>24}{estimate:>11.3f}{old:>8.1f}{new:>8.1f}", flush=True)


if __name__ == "__main__":
    main()
