"""The default against a penalty by hand, for each kind of outputs: two small problems each, with AdamW and with SGD.

By hand, the penalty is a weight times the divergence from the original model on a whole batch of the reference: the
Bernoulli KL of labels, squared differences of values and embeddings, or the user's own divergence. The weight is
chosen afterwards, as the best one that forgets no more on fresh old inputs than the default does.

    python benchmarks/output_kinds.py run --out docs/figures/output-kinds.jsonl
    python benchmarks/output_kinds.py table --out docs/figures/output-kinds.jsonl
"""

import argparse
import copy
import json
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

import mooring
from mooring.reference.kinds import Embedding, Values, choose_kind

STEPS, BATCH, WIDTH = 200, 32, 64
WEIGHTS = (0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": partial(torch.optim.AdamW, lr=2e-3),
    "SGD": partial(torch.optim.SGD, lr=0.02, momentum=0.9),
}
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Problem:
    """An old and a new task of one kind.

    Attributes:
        kind: the kind, as `attach` takes it; None to infer it.
        model: returns a new model.
        draw: (task, rows, generator) -> inputs and targets; task 0 is old and 1 is new.
        loss: the loss of both tasks.
        by_hand: the penalty of one weight by hand, of the old outputs and the new ones.
    """

    kind: Any
    model: Callable[[], nn.Module]
    draw: Callable[[int, int, torch.Generator], Batch]
    loss: Callable[[Any, Tensor], Tensor]
    by_hand: Callable[[Any, Any], Tensor]


def mlp(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, outputs)
    )


class Normalized(nn.Module):
    """A network whose outputs have norm 1."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.net = mlp(inputs, 16)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return functional.normalize(self.net(x), dim=1)


class Detector(nn.Module):
    """One box and the scores of its class, in a dictionary."""

    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        self.net = mlp(inputs, 4 + classes)

    def forward(self, x: Tensor) -> dict[str, Tensor]:  # noqa: D102
        outputs = self.net(x)
        return {"boxes": outputs[:, :4], "scores": outputs[:, 4:]}


# Data


@cache
def digits() -> tuple[Tensor, Tensor]:
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images / 8 - 1, dtype=torch.float32).view(-1, 8, 8), torch.tensor(labels)


def draw_digits(task: int, rows: int, generator: torch.Generator) -> Batch:
    """Return upright digits, or new ones that lie on their side, with their numbers."""
    images, labels = digits()
    chosen = torch.randint(len(images), (rows,), generator=generator)
    return images[chosen].rot90(task, (1, 2)).flatten(1), labels[chosen]


def draw_vectors(task: int, rows: int, generator: torch.Generator) -> Tensor:
    """Return vectors around one of two centres."""
    centre = 1.5 * torch.randn(16, generator=torch.Generator().manual_seed(7)).sign()
    return torch.randn(rows, 16, generator=generator) + (centre if task else -centre)


def rule(task: int, outputs: int) -> Tensor:
    return torch.randn(16, outputs, generator=torch.Generator().manual_seed(20 + task)) / 4


def vector_tags(task: int, rows: int, generator: torch.Generator) -> Batch:
    x = draw_vectors(task, rows, generator)
    y = (x - x.mean(0)) @ rule(task, 6)
    return x, (y > 0).float()


def digit_tags(task: int, rows: int, generator: torch.Generator) -> Batch:
    x, y = draw_digits(task, rows, generator)
    return x, torch.stack([y % 2 == 0, y > 4, y % 3 == 0, y < 2, (y == 4) | (y == 7)], 1).float()


def vector_values(task: int, rows: int, generator: torch.Generator) -> Batch:
    x = draw_vectors(task, rows, generator)
    noise = 0.1 * torch.randn(rows, 2, generator=generator)
    return x, 0.1 * (torch.sin(x @ rule(task, 2)) + noise)


def digit_images(task: int, rows: int, generator: torch.Generator) -> Batch:
    x, _ = draw_digits(task, rows, generator)
    return x, x.clone()


def vector_groups(task: int, rows: int, generator: torch.Generator) -> Batch:
    x = draw_vectors(task, rows, generator)
    return x, ((x - x.mean(0)) @ rule(task, 5)).argmax(1)


def vector_boxes(task: int, rows: int, generator: torch.Generator) -> Batch:
    x = draw_vectors(task, rows, generator)
    scores = ((x - x.mean(0)) @ rule(2 + task, 3)).argmax(1)
    return x, torch.cat([torch.sin(x @ rule(task, 4)), scores[:, None]], 1)


def digit_boxes(task: int, rows: int, generator: torch.Generator) -> Batch:
    """Return digits with the place and the spread of their ink, and their numbers."""
    x, y = draw_digits(task, rows, generator)
    ink = (x.view(-1, 8, 8) + 1).clamp(min=0)
    ink = ink / ink.sum((1, 2), keepdim=True)
    axis = torch.linspace(-1, 1, 8)
    places = [(ink.sum(dim) * axis).sum(1) for dim in (1, 2)]
    spreads = [(ink.sum(dim) * axis.square()).sum(1).sqrt() for dim in (1, 2)]
    return x, torch.stack([*places, *spreads, y.float()], 1)


# Losses and penalties


def contrast(rows: Tensor, groups: Tensor) -> Tensor:
    """Return the supervised contrastive loss at a temperature of 0.2."""
    similarities = (rows @ rows.T / 0.2).fill_diagonal_(-1e9)
    same = (groups[:, None] == groups).float().fill_diagonal_(0)
    return -(similarities.log_softmax(1) * same).sum() / same.sum().clamp(min=1)


def detection(outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
    boxes = functional.mse_loss(outputs["boxes"], targets[:, :4])
    return 5 * boxes + functional.cross_entropy(outputs["scores"], targets[:, 4].long())


def detection_divergence(old: dict[str, Tensor], new: dict[str, Tensor]) -> Tensor:
    boxes = 5 * (old["boxes"] - new["boxes"]).square().mean(1)
    p = old["scores"].softmax(1)
    return boxes + (p * (old["scores"].log_softmax(1) - new["scores"].log_softmax(1))).sum(1)


def coins(old: Tensor, new: Tensor) -> Tensor:
    entropy = functional.binary_cross_entropy_with_logits(old, old.sigmoid())
    return functional.binary_cross_entropy_with_logits(new, old.sigmoid()) - entropy


def vectors_apart(old: Tensor, new: Tensor) -> Tensor:
    return (old - new).square().sum(1).mean()


bce, mse = functional.binary_cross_entropy_with_logits, functional.mse_loss
own = (detection, lambda old, new: detection_divergence(old, new).mean())
PROBLEMS = {
    "labels, vectors": Problem(None, partial(mlp, 16, 6), vector_tags, bce, coins),
    "labels, digits": Problem(None, partial(mlp, 64, 5), digit_tags, bce, coins),
    "values, vectors": Problem(None, partial(mlp, 16, 2), vector_values, mse, mse),
    "values, digits": Problem(None, partial(mlp, 64, 64), digit_images, mse, mse),
    "embedding, vectors": Problem(None, partial(Normalized, 16), vector_groups, contrast, vectors_apart),
    "embedding, digits": Problem(None, partial(Normalized, 64), draw_digits, contrast, vectors_apart),
    "own, vectors": Problem(detection_divergence, partial(Detector, 16, 3), vector_boxes, *own),
    "own, digits": Problem(detection_divergence, partial(Detector, 64, 10), digit_boxes, *own),
}


# Runs


def train(
    problem: Problem, model: nn.Module, optimizer: Any, task: int, steps: int, seed: int, extra: Any = None
) -> None:
    generator = torch.Generator().manual_seed(1000 * seed + task)
    for step in range(steps):
        x, y = problem.draw(task, BATCH, generator)
        optimizer.zero_grad()
        loss = problem.loss(model(x), y)
        if extra is not None:
            loss = loss + extra(step)
        loss.backward()
        optimizer.step()


@torch.no_grad()
def new_loss(problem: Problem, model: nn.Module, seed: int) -> float:
    x, y = problem.draw(1, 1000, torch.Generator().manual_seed(500 + seed))
    return float(problem.loss(model(x), y))


def divergence_on_fresh(
    problem: Problem, original: nn.Module, reference: list[Batch], seed: int
) -> Callable[..., float]:
    """Return a function of a model: its divergence from the original on fresh old inputs, in nats."""
    kind = choose_kind(problem.kind or {"labels": "labels", "values": "values"}.get(NAME[problem], "embedding"))
    x, _ = problem.draw(0, 1000, torch.Generator().manual_seed(900 + seed))
    with torch.no_grad():
        if isinstance(kind, Values | Embedding):
            kind = kind.fitted([original(part) for part, _ in reference], [labels for _, labels in reference])
        stored = kind.store(original(x))

    @torch.no_grad()
    def measure(model: nn.Module) -> float:
        return float(kind.divergence(stored, model(x)).mean())

    return measure


NAME = {problem: name.partition(",")[0] for name, problem in PROBLEMS.items()}


def rows_of(name: str, optimizer: str, seed: int) -> Iterator[dict[str, Any]]:
    """Train the default, and by hand with each weight; yield what each learned and forgot."""
    problem, make = PROBLEMS[name], OPTIMIZERS[optimizer]
    torch.manual_seed(seed)
    original = problem.model()
    train(problem, original, torch.optim.AdamW(original.parameters(), lr=2e-3), 0, 800, seed)
    generator = torch.Generator().manual_seed(700 + seed)
    reference = [problem.draw(0, 24, generator) for _ in range(12)]
    forgotten = divergence_on_fresh(problem, original, reference, seed)
    with torch.no_grad():
        old = [problem_outputs(original(x)) for x, _ in reference]
    for weight in (None, 0.0, *WEIGHTS):
        model = copy.deepcopy(original)
        steps, extra, reported = make(model.parameters()), None, math.nan
        if weight is None:
            options = {"kind": problem.kind} if problem.kind else {}
            moor = mooring.attach(model, steps, reference=reference, progress=False, **options)
        elif weight:

            def extra(step: int, model: nn.Module = model, weight: float = weight) -> Tensor:
                index = step % len(reference)
                return weight * problem.by_hand(old[index], model(reference[index][0]))

        train(problem, model, steps, 1, STEPS, seed, extra)
        if weight is None:
            reported = moor.finish().nats
        row = {"problem": name, "optimizer": optimizer, "seed": seed, "weight": weight, "reported": reported}
        loss = new_loss(problem, model, seed)
        yield row | {"forgotten": forgotten(model), "loss": loss, "before": new_loss(problem, original, seed)}


def problem_outputs(outputs: Any) -> Any:
    if isinstance(outputs, dict):
        return {name: t.detach() for name, t in outputs.items()}
    return outputs.detach()


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each problem and optimizer, of means over seeds."""
    yield "| problem | optimizer | reported, nats | fresh, nats | worst seed | learned % | by hand % | its weight |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for name in PROBLEMS:
        for optimizer in OPTIMIZERS:
            own = [row for row in rows if (row["problem"], row["optimizer"]) == (name, optimizer)]
            cells = [cell for seed in sorted({row["seed"] for row in own}) if (cell := compare(own, seed))]
            if not cells:
                continue
            means = {key: sum(cell[key] for cell in cells) / len(cells) for key in ("reported", "fresh", "learned")}
            fair = [cell for cell in cells if not math.isnan(cell["weight"])]
            by_hand = f"{sum(cell['by_hand'] for cell in fair) / len(fair):.0f}" if fair else "-"
            weights = ", ".join(f"{cell['weight']:g}" for cell in fair) or "-"
            yield (
                f"| {name} | {optimizer} | {means['reported']:.3f} | {means['fresh']:.3f} | "
                f"{max(cell['fresh'] for cell in cells):.3f} | {means['learned']:.0f} | {by_hand} | {weights} |"
            )


def compare(rows: list[dict[str, Any]], seed: int) -> dict[str, float]:
    """Return what the default learned, and by hand the best weight that forgets no more, in % of what plain learns."""
    by_weight = {row["weight"]: row for row in rows if row["seed"] == seed}
    default, plain = by_weight[None], by_weight[0.0]

    def learned(row: dict[str, Any]) -> float:
        return 100 * (row["before"] - row["loss"]) / (plain["before"] - plain["loss"])

    fair = [row for w, row in by_weight.items() if w and row["forgotten"] <= max(default["forgotten"], 1e-4)]
    best = max(fair, key=learned, default=None)
    return {
        "reported": default["reported"],
        "fresh": default["forgotten"],
        "learned": learned(default),
        "by_hand": learned(best) if best else math.nan,
        "weight": best["weight"] if best else math.nan,
    }


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run", "table"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    if options.command == "run":
        with options.out.open("w") as file:
            for name in PROBLEMS:
                for optimizer in OPTIMIZERS:
                    for seed in range(options.seeds):
                        if options.only not in name:
                            continue
                        with warnings.catch_warnings():
                            warnings.simplefilter("ignore")
                            for row in rows_of(name, optimizer, seed):
                                print(json.dumps(row), file=file, flush=True)
                        print(name, optimizer, seed, file=sys.stderr)
    for line in table([json.loads(line) for line in options.out.read_text().splitlines()]):
        print(line)


if __name__ == "__main__":
    main()
