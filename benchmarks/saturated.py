"""What a budget promises of a network that fits its data almost perfectly, where curvature is almost 0.

A small convolutional network learns the digits, and then the same digits rotated or inverted, with the same outputs,
held by a reference of labelled batches. Printed are the loss on the reference itself before and after, what the budget
says of its rise, and accuracy on held-out digits, old and new; means over seeds.

    python benchmarks/saturated.py             # two minutes on one core
    python benchmarks/saturated.py --seeds 1
"""

import argparse
from collections.abc import Callable
from statistics import fmean

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import mooring
from mooring.lab.streams import digits

KNOWN, BATCH = 640, 20
"""How many training images make up the reference, in batches of what size."""

TASKS: dict[str, Callable[[Tensor], Tensor]] = {"rotated": lambda x: x.rot90(1, (2, 3)), "inverted": lambda x: 1 - x}

HELD = {
    "plain": None,
    "Budget(0.1)": {},
    "Kronecker(), Budget(0.1)": {"importance": mooring.importance.Kronecker(), "pull": mooring.Budget(0.1)},
    "Interpolation()": {"pull": mooring.Interpolation()},
}
"""How the network is held: not at all, by default, with another curvature, by the explicit step."""


def network() -> nn.Module:
    """Two convolutions and a linear layer, for images of 8 by 8."""
    two = [nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*two, nn.AvgPool2d(2), nn.Flatten(), nn.Linear(512, 10))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, epochs: int) -> None:
    """Cross entropy, in small batches."""
    for _ in range(epochs):
        for some in torch.randperm(len(x)).split(BATCH):
            optimizer.zero_grad()
            cross_entropy(model(x[some]), y[some]).backward()
            optimizer.step()


@torch.no_grad()
def measured(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
    """Loss, and accuracy in percent."""
    logits = model(x)
    return cross_entropy(logits, y).item(), 100 * (logits.argmax(1) == y).float().mean().item()


def once(task: str, how: dict[str, object] | None, seed: int) -> tuple[float, ...]:
    """Loss on the reference before and after, the estimate of its rise, old and new accuracy."""
    torch.manual_seed(seed)
    data = digits()
    x, y = data.train.images.float() / 255, data.train.labels
    test, labels = data.test.images.float() / 255, data.test.labels
    model = network()
    train(model, torch.optim.SGD(model.parameters(), 0.02, momentum=0.9), x, y, epochs=10)
    before, _ = measured(model, x[:KNOWN], y[:KNOWN])
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    known = list(zip(x[:KNOWN].split(BATCH), y[:KNOWN].split(BATCH), strict=True))
    moor = None if how is None else mooring.attach(model, optimizer, reference=known, **how)  # type: ignore[arg-type]
    changed = TASKS[task]
    train(model, optimizer, changed(x), y, epochs=3)
    after, _ = measured(model, x[:KNOWN], y[:KNOWN])
    said = 0.0 if moor is None else moor.pull_energy()
    return before, after, said, measured(model, test, labels)[1], measured(model, changed(test), labels)[1]


def main() -> None:
    """Print a row for each task and way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    seeds = parser.parse_args().seeds
    print(f"{'new data':10}{'held by':26}{'loss on the reference':>24}{'estimated':>11}{'old %':>8}{'new %':>8}")
    for task in TASKS:
        for name, how in HELD.items():
            found = zip(*(once(task, how, seed) for seed in range(seeds)), strict=True)
            before, after, said, old, new = (fmean(each) for each in found)
            moved = f"{before:.3f} -> {after:.3f}"
            print(f"{task:10}{name:26}{moved:>24}{said:>11.3f}{old:>8.1f}{new:>8.1f}", flush=True)


if __name__ == "__main__":
    main()
