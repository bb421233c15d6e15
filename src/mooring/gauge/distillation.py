"""Distillation from the original model: the gradient of the divergence on the reference, beside the task's.

It is a pass of its own, before the optimizer's step, when the activations of the training batch are freed.
"""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from mooring.gauge.gauge import Gauge, passive

FIRST_NATS = 0.1
"""The weight starts at FIRST_NATS / budget: a divergence of the whole budget then counts as this much of a loss."""

RANGE = 100.0
"""The controller keeps the weight within this factor of the first one."""

SETPOINT = 0.9
"""The part of the budget that distillation aims at; the pull keeps what is above the whole."""

SPEED = 3.0
"""The gain of the weight relative to that of the budget's scale: the parameters follow it more slowly."""

LARGEST_RATIO = 1.0
"""The largest norm of the added gradient relative to the task's, where a larger gradient makes a larger step.

There a larger one would only overshoot. Adam and its kin divide gradients by their size and need no limit: what they
get is the gradient of weight * divergence^2 / (2 * the divergence that is aimed at), which acts at once where a budget
is exceeded, and hardly where it is not.
"""

LARGEST_RISE = 10.0
"""The largest factor by which a divergence above that one raises the weight."""

NORMALIZING = ("Adafactor", "Adadelta", "Adagrad", "Muon", "RMSprop", "Rprop")
"""Optimizers without betas whose steps do not grow with the gradient."""


class Distillation:
    """Batches of the reference with the original model's predictions, one batch in turn for each step that distils.

    Args:
        reference: the batches, apart from those of the gauge.
        named: the budget.
        every: the number of steps from one that distils to the next. The weight is larger by as much there.

    Attributes:
        weight: the factor of the gradient in the mean over steps.
    """

    def __init__(self, reference: Gauge, named: float, every: int = 1) -> None:
        self.reference, self.weight, self.every = reference, first_weight(named), every

    def gradients(
        self, model: nn.Module, parameters: Sequence[Tensor], step: int, *, named: float | None = None
    ) -> dict[Tensor, Tensor]:
        """Return weight * the gradient of the mean divergence on a batch, for parameters on which it depends.

        Args:
            model: the model.
            parameters: those that have a gradient in this step.
            step: the number of the step, which chooses the batch.
            named: the budget, if the weight is in proportion to the divergence relative to it; None limits the norm by
                that of the task's gradient.
        """
        if (step + 1) % self.every:
            return {}
        with torch.enable_grad(), passive(model, self.reference.settings):
            sums, counts = self.reference.terms(model, step // self.every % len(self.reference))
            mean = sums.sum() / counts.sum()
            if not mean.requires_grad:
                return {}
            gradients = torch.autograd.grad(mean, list(parameters), allow_unused=True)
        added = {p: g for p, g in zip(parameters, gradients, strict=True) if g is not None}
        weight = self.every * self.weight
        if named is None:
            task = _norm([p.grad for p in added if p.grad is not None])
            factor = (LARGEST_RATIO * task / _norm(list(added.values()))).nan_to_num(0.0).clamp(max=weight)
        else:
            relative = mean.detach() / (SETPOINT * max(named, 1e-6))
            factor = weight * relative.nan_to_num(0.0).clamp(max=LARGEST_RISE)
        for (device, dtype), group in by_kind(added.values()).items():
            torch._foreach_mul_(group, factor.to(device, dtype))
        return added

    def adjust(self, measured: float, named: float, gain: float, *, binding: bool) -> None:
        """Raise the weight while more than SETPOINT of the budget is measured, and lower it while less is.

        It is not lowered while the budget's pull acts, which gives up more of what is learned and is relaxed first.
        """
        self.weight = next_weight(self.weight, measured, named, gain, binding=binding)


def normalizes_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer divides gradients by their size, as Adam does.

    Example:
        >>> parameters = [nn.Parameter(torch.zeros(1))]
        >>> normalizes_gradients(torch.optim.AdamW(parameters)), normalizes_gradients(torch.optim.SGD(parameters))
        (True, False)
    """
    return any("betas" in group for group in optimizer.param_groups) or type(optimizer).__name__ in NORMALIZING


def next_weight(weight: float, measured: float, named: float, gain: float, *, binding: bool) -> float:
    """Return the weight after a measurement; the arguments are those of `Distillation.adjust`.

    Example:
        >>> round(next_weight(1.0, 0.16, 0.1, 1.0, binding=False), 3), next_weight(1.0, 0.01, 0.1, 1.0, binding=True)
        (5.619, 1.0)
    """
    if not named or not math.isfinite(measured):
        return weight
    change = math.pow(max(measured, 1e-6 * named) / (SETPOINT * named), SPEED * gain)
    if binding and change < 1:
        return weight
    first = first_weight(named)
    return min(max(weight * change, first / RANGE), first * RANGE)


def first_weight(named: float) -> float:
    """Return the weight to start with.

    Example:
        >>> first_weight(0.1), first_weight(1.0)
        (1.0, 0.1)
    """
    return FIRST_NATS / max(named, 1e-6)


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


def _norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the norm of many tensors together, in float32."""
    norms: list[Tensor] = []
    for (_, dtype), group in by_kind(tensors).items():
        if dtype.itemsize > 2:
            norms += torch._foreach_norm(group)
        else:  # many at once would give norms of that dtype
            norms += [torch.linalg.vector_norm(t, dtype=torch.float32) for t in group]
    norm: Tensor = torch.linalg.vector_norm(torch.stack([n.to(norms[0].device, torch.float32) for n in norms]))
    return norm
