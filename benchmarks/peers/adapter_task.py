"""What adapters are trained on: a base model that knows an old task, a reference of it, and a new task."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from precision import autocast
from torch import Tensor, nn
from torch.nn import functional

Batch = tuple[Tensor, Tensor]
Result = tuple[float, float]
"""What is kept and what is learned: accuracies in percent, or negative losses in nats; more is better."""


@dataclass
class Task:
    """A base model, and how its adapters are trained and evaluated.

    Attributes:
        base: the model that knows the old task.
        targets: the names of the layers that get adapters.
        reference: batches of what it knows.
        batches: returns the batches of the new task, in the order of a seed.
        optimizer: makes the optimizer, with a factor of the usual learning rate.
        evaluate: returns what is kept and what is learned.
        precision: "float32", "tf32" or "bf16", in which training computes.
        device: where all of it is.
        shared: what several runs of a method use, such as decompositions of the base's weights.
    """

    base: nn.Module
    targets: list[str]
    reference: list[Batch]
    batches: Callable[[int], list[Batch]]
    optimizer: Callable[[list[nn.Parameter], float], torch.optim.Optimizer]
    evaluate: Callable[[nn.Module], Result]
    precision: str = "float32"
    device: str = "cpu"
    shared: dict[Any, Any] = field(default_factory=dict)

    def autocast(self) -> Any:
        """Return the context in which training computes its loss."""
        return autocast(self.precision, self.device)

    def before(self) -> Result:
        """Return what the base model knows of both tasks."""
        if "before" not in self.shared:
            self.shared["before"] = self.evaluate(self.base)
        result: Result = self.shared["before"]
        return result


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross entropy."""
    return functional.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())


def digits_task(seed: int, epochs: int) -> Task:
    """Return the task of `benchmarks/adapters.py`: digits on their side after upright ones. Each seed has its base."""
    from rotated_digits import TRAINED, accuracy, digits, pretrained

    upright, rotated, y = digits()

    def batches(seed: int) -> list[Batch]:
        torch.manual_seed(100 + seed)
        order = torch.cat([torch.randperm(TRAINED) for _ in range(epochs)])
        return [(rotated[chosen], y[chosen]) for chosen in order.split(20)]

    def evaluate(model: nn.Module) -> Result:
        return accuracy(model, upright, y), accuracy(model, rotated, y)

    return Task(
        base=pretrained(seed, 12),
        targets=["0", "2"],
        reference=list(zip(upright[:640].split(20), y[:640].split(20), strict=True)),
        batches=batches,
        optimizer=lambda parameters, rate: torch.optim.SGD(parameters, lr=0.01 * rate, momentum=0.9),
        evaluate=evaluate,
    )


def gpt_task(
    size_name: str,
    folder: Path,
    device: str,
    precision: str,
    *,
    batch: int | None = None,
    steps: int | None = None,
    lr: float | None = None,
) -> Task:
    """Return the task of `examples/finetune_language_model.py`: prose after code. Seeds share the base.

    Args:
        size_name: the key of the size in the example.
        folder: has the file of the pre-trained GPT.
        device: where it trains.
        precision: that of the task.
        batch: the number of sequences of each batch; by default that of the size.
        steps: the number of steps; by default that of the size.
        lr: the usual learning rate; by default that of the size.
    """
    from code_and_prose import CodeAndProse

    texts = CodeAndProse(size_name, folder, device, batch=batch, steps=steps)
    held_out = [texts.held_out(domain) for domain in ("code", "prose")]

    @torch.no_grad()
    def evaluate(model: nn.Module) -> Result:
        losses = [torch.stack([loss_of(model, batch) for batch in batches]).mean() for batches in held_out]
        kept, learned = (-torch.stack(losses)).tolist()
        return kept, learned

    def optimizer(parameters: list[nn.Parameter], rate: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=(lr or texts.size.tuning_lr) * rate, weight_decay=0.0)

    return Task(
        base=texts.gpt.requires_grad_(False),
        targets=["mix", "out", "up", "down"],
        reference=texts.reference(),
        batches=texts.training,
        optimizer=optimizer,
        evaluate=evaluate,
        precision=precision,
        device=device,
    )
