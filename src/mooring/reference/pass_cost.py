"""What measurements and distillation may cost, and how often and on how much data they therefore run.

A training step is a forward pass, and a backward pass of about twice its cost. Where most weights are frozen, as with
adapters, their gradients are not computed, and both passes cost about the same. All parts are of a step on a
batch that is as large as those of the reference.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from mooring.reference.batches import rows_of, samples_of

MEASURED_PART = 0.05
"""The largest part of training's time that measurements may take, where all weights are trained."""

FORWARD_PART = 1 / 3
"""The part of a training step that a forward pass takes then."""

MEASURING_INTERVAL = math.ceil(FORWARD_PART / MEASURED_PART)
"""The number of steps between measurements of one batch."""


@dataclass(frozen=True)
class DistillationCost:
    """What distillation may cost by default.

    Attributes:
        price: the largest part of a training step, in the mean over steps.
        samples: the part of a batch of the reference that one step distils.
        fewest: the number of samples that a step distils at least, if half a batch has so many. The gradient of fewer
            is so noisy that its noise alone moves the outputs.
    """

    price: float
    samples: float
    fewest: int

    def part_size(self, count: int) -> int:
        """Return the number of samples of a batch that one step distils.

        Example:
            >>> [DISTILLATION.part_size(count) for count in (8, 32, 64, 128)]
            [4, 16, 16, 32]
        """
        return math.ceil(max(self.samples * count, min(self.fewest, count / 2)))


DISTILLATION = DistillationCost(price=0.5, samples=1 / 4, fewest=16)
"""That of models whose weights are mostly trained, in every step.

Optimizers such as Adam do not forget a large gradient soon, so more data in every second step, with twice the weight,
learns less.
"""

DISTILLATION_OF_ADAPTERS = DistillationCost(price=0.5, samples=1 / 5, fewest=4)
"""That of models whose weights are mostly frozen: their few directions need less data to be distinguished."""


def mostly_frozen(model: nn.Module) -> bool:
    """Return whether less than half of the weights are trained."""
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return 2 * sum(size for size, trained in sizes if trained) < sum(size for size, _ in sizes)


def distillation_schedule(model: nn.Module, batches: Sequence[Any], *, whole: bool = False) -> tuple[list[Any], int]:
    """Return parts of batches, and after how many steps the next part is distilled.

    Batches that cannot be split are distilled whole, in fewer steps.

    Args:
        model: the model.
        batches: batches of the reference.
        whole: whether no batch can be split.

    Example:
        >>> import torch
        >>> parts, every = distillation_schedule(nn.Linear(2, 2), [torch.zeros(8, 2)])
        >>> [len(part) for part in parts], every
        ([4, 4], 1)
    """
    if not batches:
        return [], 1
    cost = DISTILLATION_OF_ADAPTERS if mostly_frozen(model) else DISTILLATION
    parts, largest = [], 0.0
    for batch in batches:
        count = 0 if whole else samples_of(batch)
        size = cost.part_size(count) if count else 0
        parts += [rows_of(batch, slice(start, start + size)) for start in range(0, count, size)] if size else [batch]
        largest = max(largest, size / count if size else 1.0)
    return parts, math.ceil(largest / cost.price)
