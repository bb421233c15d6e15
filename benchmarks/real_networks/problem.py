"""What is fine-tuned: a trained network with its old outputs and new ones, and data of both tasks."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from precision import autocast
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

Batch = tuple[Tensor, Tensor]


@dataclass
class Problem:
    """A trained network, data of what it knows, and a new task. All tensors are on the device of training.

    Attributes:
        network: returns the network of a seed, trained on the old task: a `TwoHeads`.
        reference: old inputs and labels that may be used in training.
        old_test: other old data.
        new_train, new_test: the new task.
        optimizer: makes the optimizer from parameters and a factor of the learning rate.
        epochs: of the new task.
        batch: the batch size of training.
        reference_batch: that of the reference.
        head_rate: the factor of the learning rate of parts that are trained alone, such as a last layer.
        prepare: makes inputs from stored ones, such as images in bytes.
        precision: "float32", "tf32" or "bf16", in which training computes; it is evaluated without autocast.
        steps: the largest number of steps of one training; None for all.
        shared: results of a training that several runs use, by its name.
    """

    network: Callable[[int], Any]
    reference: Batch
    old_test: Batch
    new_train: Batch
    new_test: Batch
    optimizer: Callable[[Any, float], torch.optim.Optimizer]
    epochs: int
    batch: int
    reference_batch: int
    head_rate: float = 1.0
    prepare: Callable[[Tensor], Tensor] = field(default=lambda x: x)
    precision: str = "float32"
    steps: int | None = None
    shared: dict[str, Any] = field(default_factory=dict)

    def autocast(self) -> Any:
        """Return the context in which training computes its loss."""
        return autocast(self.precision, self.new_train[0].device.type)


class TwoHeads(nn.Module):
    """A network with the outputs that it has, and new ones: the same if there is no new head."""

    def __init__(self, body: nn.Module, old: nn.Module, new: nn.Module | None) -> None:
        super().__init__()
        self.body, self.old = body, old
        self.new_head, self.uses_new = new, False

    def forward(self, x: Tensor) -> Tensor:
        """Return the old outputs, or the new ones if `new` calls it."""
        head = self.new_head if self.uses_new and self.new_head is not None else self.old
        outputs: Tensor = head(self.body(x))
        return outputs

    def new(self, x: Tensor) -> Tensor:
        """Return the outputs of the new task, by a call of the model itself, which Mooring observes."""
        self.uses_new = True
        try:
            outputs: Tensor = self(x)
        finally:
            self.uses_new = False
        return outputs


def loss_of(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy of outputs (..., classes) in float32."""
    return cross_entropy(outputs.float().flatten(0, -2), labels.flatten())


def shuffled(count: int, size: int, epochs: int, device: torch.device | None = None) -> Iterator[Tensor]:
    """Yield the indices of batches, in a new order in each epoch."""
    for _ in range(epochs):
        yield from torch.randperm(count).to(device or torch.device("cpu")).split(size)
