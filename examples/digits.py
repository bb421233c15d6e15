"""Learn the ten digits two at a time, without the old ones, and measure what is forgotten.

A small network learns five tasks, with one head per task. The same training loop runs without Mooring, with EWC as a
penalty, and with the explicit step, which has no strength to tune.

    python examples/digits.py
"""

import argparse
import time

import torch
from sklearn.datasets import load_digits
from torch import nn

import mooring

METHODS = {
    "plain fine-tuning": None,
    "EWC, a penalty at 1e4": {"importance": "ewc", "pull": mooring.Penalty(1e4)},
    "EWC, a penalty at 1e5": {"importance": "ewc", "pull": mooring.Penalty(1e5)},
    "EWC, the explicit step": {"importance": "ewc"},
    "MAS, the explicit step": {"importance": "mas"},
}


class Network(nn.Module):
    """A body that all tasks share, with one head per task."""

    def __init__(self, tasks: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU())
        self.heads = nn.ModuleList(nn.Linear(100, 2) for _ in range(tasks))
        self.task = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of the current task's head."""
        return self.heads[self.task](self.body(x))


def digit_tasks() -> list[tuple[torch.Tensor, ...]]:
    """Return the tasks 0 and 1, 2 and 3, ...: training inputs and labels, test inputs and labels."""
    digits = load_digits()
    x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = order[:1400], order[1400:]
    tasks = []
    for task in range(5):
        training, held_out = train[y[train] // 2 == task], test[y[test] // 2 == task]
        tasks.append((x[training], y[training] % 2, x[held_out], y[held_out] % 2))
    return tasks


def accuracies(model: Network, tasks: list[tuple[torch.Tensor, ...]]) -> torch.Tensor:
    """Return the test accuracy on each task, in percent."""
    scores = torch.zeros(len(tasks))
    with torch.no_grad():
        for model.task, (_, _, x, y) in enumerate(tasks):
            scores[model.task] = 100 * (model(x).argmax(1) == y).float().mean()
    return scores


def train(options: dict | None, seed: int, epochs: int) -> tuple[float, float]:
    """Train on all tasks; return the final average accuracy and the average forgetting."""
    torch.manual_seed(seed)
    tasks = digit_tasks()
    model = Network(len(tasks))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    if options is not None:
        moor = mooring.attach(model, optimizer, exclude="heads", **options)  # the first of two lines

    best = torch.zeros(len(tasks))
    for task, (x, y, _, _) in enumerate(tasks):
        model.task = task
        for _ in range(epochs):
            for batch in torch.randperm(len(x)).split(10):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
                optimizer.step()
        if options is not None:
            moor.consolidate()  # and the second
        final = accuracies(model, tasks)
        best[: task + 1] = torch.maximum(best, final)[: task + 1]
    return float(final.mean()), float((best - final).mean())


def main() -> None:
    """Train every method with every seed and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)  # the network is too small for several threads
    print(f"Digits two at a time: 5 tasks, {options.epochs} epochs each, mean and range over {options.seeds} seeds")
    print(f"{'':26s}{'accuracy %':>24s}{'forgotten %':>24s}{'seconds':>10s}")
    for name, method in METHODS.items():
        start = time.perf_counter()
        runs = [train(method, seed, options.epochs) for seed in range(options.seeds)]
        cells = [f"{sum(v) / len(v):.1f} ({min(v):.1f} to {max(v):.1f})" for v in zip(*runs, strict=True)]
        print(f"{name:26s}{cells[0]:>24s}{cells[1]:>24s}{time.perf_counter() - start:10.1f}", flush=True)


if __name__ == "__main__":
    main()
