"""Distillation from the original model: the gradient of the divergence on the reference, beside the task's.

It is a pass of its own, before the optimizer's step, when the activations of the training batch are freed.
"""

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mooring.distributed.dtensor import local_tensor, local_tensors, reduce_over_shards, sharded
from mooring.errors import MooringError
from mooring.hold.measure import Gauge, make_gauge, passive
from mooring.reference.batches import Loss, Outputs, samples_of
from mooring.reference.mixtures import MixedBatches, count_inputs
from mooring.reference.pass_cost import distillation_schedule
from mooring.rules import Budget
from mooring.rules.pull import Number

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

DISTILS_BY_DEFAULT = True
"""Whether `Budget(distil=None)` distils."""

ROUNDS = 16
"""The number of mixtures of each batch that is distilled; they cost so many forward passes when they are recorded."""

MOST_INPUTS = 300
"""A reference that has more inputs to distil is not mixed: it shows enough by itself."""

NORMALIZING = ("Adafactor", "Adadelta", "Adagrad", "Muon", "RMSprop", "Rprop")
"""Optimizers without betas whose steps do not grow with the gradient."""


class WeightedDistillation:
    """The weight of the added gradient in each run, and the steps in which batches of past tasks are distilled.

    The tasks take turns, and so do the batches of each.

    Args:
        named: the budget of each run, float64 of shape (runs,).
        every: the number of steps from one that distils to the next. The weight is larger by as much there.
        control: how the weight starts and moves.

    Attributes:
        weight: the factor of the gradient in the mean over steps, float64 of shape (runs,).

    Example:
        >>> distillation = WeightedDistillation(torch.tensor([0.1]), every=2)
        >>> [distillation.turn(step, [3, 1]) for step in range(8)]
        [None, (0, 0), None, (1, 0), None, (0, 1), None, (1, 0)]
    """

    def __init__(self, named: Tensor, every: int = 1, control: WeightControl = DIRECT) -> None:
        self.every, self.control = every, control
        self.start(named)

    def start(self, named: Tensor) -> None:
        """Start with the first weight again."""
        self.weight = first_weight(named, self.control)

    def turn(self, step: int, batches: Sequence[int]) -> tuple[int, int] | None:
        """Return the task and the batch of it that a step distils; None if it does not distil.

        Args:
            step: the number of the step in its task.
            batches: the number of batches of each past task.
        """
        if (step + 1) % self.every:
            return None
        turn, task = divmod(step // self.every, len(batches))
        return task, turn % batches[task]

    def adjust(self, measured: Tensor, named: Tensor, gain: Tensor, binding: Tensor) -> None:
        """Raise the weight while more than SETPOINT of the budget is measured, and lower it while less is.

        Args:
            measured: the divergence of one batch of the gauge.
            named: the budget.
            gain: the part of a pass through the gauge that this batch is.
            binding: whether the pull acts.
        """
        gain = torch.ones_like(gain) if self.control.normalized else gain
        self.weight = next_weight(self.weight, measured, named, gain, binding, self.control)


class Distillation(WeightedDistillation):
    """Batches of past tasks with the original model's predictions: one batch for each step that distils.

    Args:
        references: the batches of each task, apart from those of its gauge.
        named: the budget.
        every: the number of steps from one that distils to the next.
        control: how the weight starts and moves.
    """

    def __init__(
        self, references: Sequence[Gauge], named: Tensor, every: int = 1, control: WeightControl = DIRECT
    ) -> None:
        super().__init__(named, every, control)
        self.references = list(references)

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
        if (turn := self.turn(step, [*map(len, self.references)])) is None:
            return {}
        reference = self.references[turn[0]]
        shards = list(model.parameters()) if any(map(sharded, parameters)) else []  # which a forward pass may replace
        with torch.enable_grad(), passive(model, reference.settings):
            sums, counts = reference.terms(model, turn[1])
            mean = sums.sum() / counts.sum()
            if not mean.requires_grad:
                return {}
            gradients = _gradients_of(mean, parameters, shards)
        added = {p: g for p, g in zip(parameters, gradients, strict=True) if g is not None}
        factor: Number = self.every * float(self.weight)
        if not self.control.normalized and added:
            own = _norm([p.grad for p in added if p.grad is not None])
            factor = limited(factor, own, _norm(list(added.values())))
        for (device, dtype), group in by_kind(local_tensors(list(added.values()))).items():
            torch._foreach_mul_(group, factor.to(device, dtype) if isinstance(factor, Tensor) else factor)
        return added


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
    weight: Tensor, measured: Tensor, named: Tensor, gain: Tensor, binding: Tensor, control: WeightControl = DIRECT
) -> Tensor:
    """Return the weight after a measurement; the arguments are those of `WeightedDistillation.adjust`.

    It is not lowered while the budget's pull acts, which gives up more of what is learned and is relaxed first.

    Example:
        >>> one, acts = torch.ones(2, dtype=torch.float64), torch.tensor([False, True])
        >>> next_weight(one, torch.tensor([0.16, 0.01]).double(), 0.1 * one, one, acts)
        tensor([5.6187, 1.0000], dtype=torch.float64)
    """
    change = (measured.maximum(1e-6 * named) / (SETPOINT * named)).pow(control.speed * gain)
    moves = (named > 0) & measured.isfinite() & ((change >= 1) | ~binding)
    first = first_weight(named, control)
    limited_weight = (weight * change).minimum(first * control.largest).maximum(first * control.smallest)
    return torch.where(moves, limited_weight, weight)


def first_weight(named: Tensor, control: WeightControl = DIRECT) -> Tensor:
    """Return the weight to start with.

    Example:
        >>> first_weight(torch.tensor([0.1])), first_weight(torch.tensor([0.1]), NORMALIZED)
        (tensor([1.]), tensor([5.]))
    """
    return torch.full_like(named, control.first) if control.normalized else control.first / named.clamp(min=1e-6)


def limited(weight: Number, task_norm: Tensor, added_norm: Tensor) -> Tensor:
    """Return the factor of the added gradient: the weight, or less if that gradient were longer than the task's allows.

    Args:
        weight: the factor without a limit.
        task_norm: the norm of the task's gradient.
        added_norm: the norm of the gradient that is added.

    Example:
        >>> limited(2.0, torch.tensor([1.0, 1.0]), torch.tensor([0.1, 4.0]))
        tensor([2.0000, 0.2500])
    """
    return (LARGEST_RATIO * task_norm / added_norm).nan_to_num(0.0).clamp(max=weight)


def make_distillation(
    model: nn.Module,
    budget: Budget,
    named: Tensor,
    batches: Sequence[Any],
    loss: Loss | None,
    outputs: Outputs | None,
    control: WeightControl,
    number_of: Sequence[int] = (),
) -> Distillation | None:
    """Return the distillation of a budget; None if it does not distil, or the outputs are no distribution.

    Args:
        model: the model.
        budget: the budget.
        named: its nats in the task that begins, of shape (1,).
        batches: the batches to distil.
        loss: the loss that is measured; None for the divergence.
        outputs: takes what the model returns and gives the tensor of its outputs; None is `find_outputs`.
        control: how the weight starts and moves.
        number_of: the number of each batch in what the user gave, for error messages.
    """
    if (schedule := distilled_parts(model, budget, batches, control)) is None:
        return None
    if loss is not None:
        if budget.distil:
            raise MooringError("Budget(distil=True) does not work where a loss is given: leave distil out")
        return None
    parts, every = schedule
    gauge = make_gauge(model, parts, None, outputs, _numbers_of_parts(batches, parts, number_of))
    if gauge.loss is not None:
        return None
    rounds = mixture_rounds(budget, sum(map(count_inputs, parts)))
    if rounds and _predicts_once(gauge):
        mixed = Gauge(MixedBatches(parts, rounds), None, outputs)
        mixed.record(model, known=gauge.targets)
        gauge = mixed
    return Distillation([gauge], named, every, control)


def distilled_parts(
    model: nn.Module, budget: Budget, batches: Sequence[Any], control: WeightControl
) -> tuple[Sequence[Any], int] | None:
    """Return the parts of batches that a step distils, and the number of steps from one to the next; None for none."""
    if not (DISTILS_BY_DEFAULT if budget.distil is None else budget.distil):
        return None
    if budget.distil is True:
        return batches, 1
    return distillation_schedule(model, batches, normalized=control.normalized)


def mixture_rounds(budget: Budget, inputs: int) -> int:
    """Return the number of mixtures of each batch that are distilled, of so many inputs together.

    Example:
        >>> mixture_rounds(Budget(0.1), 64), mixture_rounds(Budget(0.1, distil="unmixed"), 64)
        (16, 0)
    """
    return 0 if budget.distil == "unmixed" or inputs > MOST_INPUTS else ROUNDS


def _numbers_of_parts(batches: Sequence[Any], parts: Sequence[Any], number_of: Sequence[int]) -> list[int]:
    """Return the number of the batch that each part is of; empty if the batches have no numbers.

    Example:
        >>> import torch
        >>> _numbers_of_parts(torch.zeros(2, 3, 1), [torch.zeros(2, 1), torch.zeros(1, 1)] * 2, [1, 4])
        [1, 1, 4, 4]
    """
    numbers, remaining = list[int](), iter(parts)
    for batch, number in zip(batches, number_of, strict=False):
        left = samples_of(batch)
        for part in remaining:
            numbers.append(number)
            left -= samples_of(part)
            if left <= 0:
                break
    return numbers


def _predicts_once(gauge: Gauge) -> bool:
    """Return whether there is one prediction for each input; the predictions for many mixtures are then small."""
    pairs = zip(gauge.batches, gauge.targets, strict=True)
    return all(not isinstance(t, float) and len(t.log_probabilities) == count_inputs(batch) for batch, t in pairs)


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
