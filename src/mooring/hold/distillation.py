"""Distillation from the original model: the gradient of the divergence on the reference, beside the task's.

It is a pass of its own, before the optimizer's step, when the activations of the training batch are freed.
"""

import math
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mooring.distributed.dtensor import local_tensor, local_tensors, reduce_over_shards, sharded
from mooring.hold.gauge import Gauge, passive

SETPOINT = 0.9
"""The part of the budget that distillation aims at; the pull keeps what is above the whole."""

LARGEST_RATIO = 1.0
"""The largest norm of the added gradient relative to the task's, beside optimizers such as SGD."""


@dataclass(frozen=True)
class WeightControl:
    """How the weight of the added gradient starts, and how it follows the measured value.

    Attributes:
        normalized: whether the optimizer divides gradients by their size.
        first: the weight to start with; over the budget unless `normalized`.
        speed: the weight is multiplied by (measured / wanted)^speed over one pass through all batches of the gauge, or
            after the measurement of each batch if `normalized`.
        smallest, largest: the range of the weight, as factors of the first one.
    """

    normalized: bool
    first: float
    speed: float
    smallest: float
    largest: float


DIRECT = WeightControl(normalized=False, first=0.1, speed=3.0, smallest=0.01, largest=100.0)
"""For optimizers such as SGD, where a larger gradient makes a larger step.

One that is longer than the task's overshoots, so its norm is limited, see LARGEST_RATIO.
"""

NORMALIZED = WeightControl(normalized=True, first=5.0, speed=0.1, smallest=1e-3, largest=1.0)
"""For optimizers such as Adam, which divide gradients by their size.

There a weight that is too large is worse than one that is too small. The added gradient and its noise take the place of
the task's, which then hardly learns, and the noise alone moves the outputs. So the weight never rises above its start,
however small the budget is: what is forgotten beyond the budget is returned when the task ends, and before that the
pull in reserve limits it. The weight falls slowly, because the outputs follow it only after a hundred steps or so,
however many batches the gauge has.
"""

NORMALIZING = ("Adafactor", "Adadelta", "Adagrad", "Muon", "RMSprop", "Rprop")
"""Optimizers without betas whose steps do not grow with the gradient."""


class Distillation:
    """Batches of past tasks with the original model's predictions: one batch for each step that distils.

    The tasks take turns, and so do the batches of each.

    Args:
        references: the batches of each task, apart from those of its gauge.
        named: the budget.
        every: the number of steps from one that distils to the next. The weight is larger by as much there.
        control: how the weight starts and moves.

    Attributes:
        weight: the factor of the gradient in the mean over steps.
    """

    def __init__(
        self, references: Sequence[Gauge], named: float, every: int = 1, control: WeightControl = DIRECT
    ) -> None:
        self.references, self.every, self.control = list(references), every, control
        self.weight = first_weight(named, control)

    def joined(self, other: "Distillation") -> "Distillation":
        """Return the distillation of these tasks and of another one's, with its weight and the lower cost of both."""
        both = copy(other)
        both.references, both.every = [*self.references, *other.references], max(self.every, other.every)
        return both

    def gradients(self, model: nn.Module, parameters: Sequence[Tensor], step: int) -> dict[Tensor, Tensor]:
        """Return weight * the gradient of the mean divergence on a batch, for parameters on which it depends.

        Args:
            model: the model.
            parameters: those that have a gradient in this step.
            step: the number of the step, which chooses the batch.
        """
        if (step + 1) % self.every:
            return {}
        turn, task = divmod(step // self.every, len(self.references))
        reference = self.references[task]
        shards = list(model.parameters()) if any(map(sharded, parameters)) else []  # which a forward pass may replace
        with torch.enable_grad(), passive(model, reference.settings):
            sums, counts = reference.terms(model, turn % len(reference))
            mean = sums.sum() / counts.sum()
            if not mean.requires_grad:
                return {}
            gradients = _gradients_of(mean, parameters, shards)
        added = {p: g for p, g in zip(parameters, gradients, strict=True) if g is not None}
        factor: float | Tensor = self.every * self.weight
        if not self.control.normalized and added:
            own = _norm([p.grad for p in added if p.grad is not None])
            factor = (LARGEST_RATIO * own / _norm(list(added.values()))).nan_to_num(0.0).clamp(max=factor)
        for (device, dtype), group in by_kind(local_tensors(list(added.values()))).items():
            torch._foreach_mul_(group, factor.to(device, dtype) if isinstance(factor, Tensor) else factor)
        return added

    def adjust(self, measured: float, named: float, gain: float, *, binding: bool) -> None:
        """Raise the weight while more than SETPOINT of the budget is measured, and lower it while less is.

        It is not lowered while the budget's pull acts, which gives up more of what is learned and is relaxed first.

        Args:
            measured: the divergence of one batch of the gauge.
            named: the budget.
            gain: the part of a pass through the gauge that this batch is.
            binding: whether the pull acts.
        """
        gain = 1.0 if self.control.normalized else gain
        self.weight = next_weight(self.weight, measured, named, gain, binding=binding, control=self.control)


def weight_control(optimizer: torch.optim.Optimizer) -> WeightControl:
    """Return how the weight moves beside an optimizer: by whether it divides gradients by their size, as Adam does.

    Example:
        >>> parameters = [nn.Parameter(torch.zeros(1))]
        >>> [weight_control(kind(parameters)).normalized for kind in (torch.optim.AdamW, torch.optim.SGD)]
        [True, False]
    """
    normalizes = any("betas" in group for group in optimizer.param_groups) or type(optimizer).__name__ in NORMALIZING
    return NORMALIZED if normalizes else DIRECT


def next_weight(
    weight: float, measured: float, named: float, gain: float, *, binding: bool, control: WeightControl = DIRECT
) -> float:
    """Return the weight after a measurement; the arguments are those of `Distillation.adjust`.

    Example:
        >>> round(next_weight(1.0, 0.16, 0.1, 1.0, binding=False), 3), next_weight(1.0, 0.01, 0.1, 1.0, binding=True)
        (5.619, 1.0)
    """
    if not named or not math.isfinite(measured):
        return weight
    change = math.pow(max(measured, 1e-6 * named) / (SETPOINT * named), control.speed * gain)
    if binding and change < 1:
        return weight
    first = first_weight(named, control)
    return min(max(weight * change, first * control.smallest), first * control.largest)


def first_weight(named: float, control: WeightControl = DIRECT) -> float:
    """Return the weight to start with.

    Example:
        >>> first_weight(0.1), first_weight(0.1, NORMALIZED)
        (1.0, 5.0)
    """
    return control.first if control.normalized else control.first / max(named, 1e-6)


def by_kind(tensors: Iterable[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    """Return tensors by device and dtype, for operations on many at once.

    Example:
        >>> {dtype: len(group) for (_, dtype), group in by_kind([torch.zeros(2), torch.zeros(3)]).items()}
        {torch.float32: 2}
    """
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for t in tensors:
        groups.setdefault((t.device, t.dtype), []).append(t)
    return groups


def _gradients_of(loss: Tensor, parameters: Sequence[Tensor], shards: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Return the gradients of a loss, and leave those of the task as they are.

    Args:
        loss: the loss.
        parameters: those to return the gradients of.
        shards: all parameters of the model, if some are sharded: their gradients exist only where the backward pass
            leaves them, in `grad`, as a mean over ranks.
    """
    if not shards:
        return torch.autograd.grad(loss, list(parameters), allow_unused=True)
    task = [(p, p.grad) for p in shards]
    for p, _ in task:
        p.grad = None
    try:
        torch.autograd.backward(loss)
        return [p.grad for p in parameters]
    finally:
        for p, gradient in task:
            p.grad = gradient


def _norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the norm of many tensors together, in float64."""
    if any(map(sharded, tensors)):
        squares = [torch.linalg.vector_norm(local_tensor(t), dtype=torch.float64).square() for t in tensors]
        return torch.stack(reduce_over_shards(squares, tensors)).sum().sqrt()
    norms: list[Tensor] = []
    for (_, dtype), group in by_kind(tensors).items():
        if dtype.itemsize > 2:
            norms += torch._foreach_norm(group)
        else:  # many at once would give norms of that dtype
            norms += [torch.linalg.vector_norm(t, dtype=torch.float32) for t in group]
    norm: Tensor = torch.linalg.vector_norm(torch.stack([n.to(norms[0].device, torch.float64) for n in norms]))
    return norm
