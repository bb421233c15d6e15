"""Distillation from the original model: the gradient of the divergence on the reference, beside the task's.

It is a pass of its own, before the optimizer's step, when the activations of the training batch are freed.
"""

import math
from collections.abc import Iterable, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from mooring.distributed.dtensor import local_tensor, local_tensors, reduce_over_shards, sharded
from mooring.errors import MooringError
from mooring.hold.measure import Gauge
from mooring.reference.batches import Loss, Outputs, samples_of
from mooring.reference.kinds import OutputKind
from mooring.reference.mixtures import MixedBatches, count_inputs
from mooring.reference.pass_cost import distillation_schedule
from mooring.rules import Budget

MEMORY_OF_NORM = 0.99
"""The decay, for each step, of the largest norm of the task's gradient, which limits that of the added one.

The task's present norm would not do: it vanishes when the task is learned, and would switch distillation off just then.
"""

GAIN = 2.0
"""The gain of the weight over one pass through all batches of the gauges."""

LARGEST_RATIO = 16.0
"""A measurement counts at most as so many budgets, and at least as a budget over so many."""

LARGEST_WEIGHT = 1e4
"""The largest weight; long before it the limit of the added gradient acts."""

SMALLEST_BUDGET = 1e-6
"""A smaller budget counts as this one for the weight."""

DISTILS_BY_DEFAULT = True
"""Whether `Budget(distil=None)` distils."""

MOST_ROUNDS = 16
"""The largest number of mixtures of each batch that is distilled; they cost so many forward passes when recorded."""

MIXED_INPUTS = 2048
"""A reference with fewer inputs gets so many mixtures, as far as MOST_ROUNDS allow; a larger one gets one for each."""


class WeightedDistillation:
    """The weight of the added gradient in each run, and the steps in which batches of past tasks are distilled.

    The tasks take turns, and so do the batches of each.

    Args:
        runs: their number.
        every: the number of steps from one that distils to the next. The weight is larger by as much there.

    Attributes:
        weight: the factor of the gradient in the mean over steps, float64 of shape (runs,), on the host.
        task_norm: the largest norm of the task's gradient in the last steps, float64 of shape (runs,).

    Example:
        >>> distillation = WeightedDistillation(1, every=2)
        >>> [distillation.turn(step, [3, 1]) for step in range(8)]
        [None, (0, 0), None, (1, 0), None, (0, 1), None, (1, 0)]
    """

    def __init__(self, runs: int = 1, every: int = 1) -> None:
        self.every = every
        self.start(runs)

    def start(self, runs: int) -> None:
        """Start a task."""
        self.weight = torch.ones(runs, dtype=torch.float64)
        self.task_norm = torch.zeros(runs, dtype=torch.float64)

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

    def adjust(self, measured: Tensor, named: Tensor, batches: int) -> None:
        """Raise the weight of each run while more than its budget is measured, see `next_weight`."""
        self.weight = next_weight(self.weight, measured, named, batches)

    def factors(self, tasks: int, scale: float = 1.0) -> Tensor:
        """Return the factor of the gradient in a step that distils, of shape (runs,).

        Args:
            tasks: the number of past tasks, which take turns and count as much as the present one each.
            scale: of the loss of the present task, see `mooring.hold.loss_scale`.
        """
        return self.every * tasks * scale * self.weight

    def limited(self, factors: Tensor, task_norm: Tensor, added_norm: Tensor) -> Tensor:
        """Return factors with which the added gradient is no longer than the task's own was in the last steps.

        Args:
            factors: without a limit, of shape (runs,).
            task_norm: the norm of the task's gradient in this step.
            added_norm: the norm of the gradient that is added.

        Example:
            >>> norms = torch.tensor([2.0]), torch.tensor([1.0])
            >>> distillation = WeightedDistillation()
            >>> distillation.limited(torch.tensor([1.0]), *norms), distillation.limited(torch.tensor([9.0]), *norms)
            (tensor([1.]), tensor([2.]))
            >>> distillation.limited(torch.tensor([9.0]), torch.tensor([math.inf]), norms[1]) < 2
            tensor([True])
        """
        norm = self.task_norm = self.task_norm.to(task_norm)
        finite = task_norm.nan_to_num(0.0, posinf=0.0)  # a step that overflowed says nothing of the next ones
        torch.maximum(MEMORY_OF_NORM * norm, finite, out=norm)  # in place, because recorded steps read this memory
        return (norm / added_norm).nan_to_num(0.0, posinf=math.inf).minimum(factors)

    def keep(self, rows: Tensor) -> None:
        """Keep only the runs in these rows."""
        self.weight, self.task_norm = self.weight[rows.cpu()], self.task_norm[rows.to(self.task_norm.device)]


class Distillation(WeightedDistillation):
    """Batches of past tasks with the original model's predictions: one batch for each step that distils.

    Args:
        references: the batches of each task, apart from those of its gauge.
        every: the number of steps from one that distils to the next.
    """

    def __init__(self, references: Sequence[Gauge], every: int = 1) -> None:
        super().__init__(1, every)
        self.references = list(references)

    def joined(self, other: "Distillation") -> "Distillation":
        """Return the distillation of these tasks and of another one's, with this weight and the lower cost of both."""
        both = copy(self)
        both.references, both.every = [*self.references, *other.references], max(self.every, other.every)
        return both

    def gradients(
        self, model: nn.Module, parameters: Sequence[Tensor], step: int, scale: float
    ) -> dict[Tensor, Tensor]:
        """Return the weighted gradient of the mean divergence on a batch, for parameters on which it depends.

        Args:
            model: the model.
            parameters: those that have a gradient in this step.
            step: the number of the step, which chooses the batch.
            scale: of the loss of the present task.
        """
        if (turn := self.turn(step, [*map(len, self.references)])) is None:
            return {}
        added = gradients_of_divergence(self.references[turn[0]], model, parameters, turn[1])
        if not added:
            return {}
        task_norm = _norm([p.grad for p in added if p.grad is not None])
        factors = torch.full_like(task_norm, float(self.factors(len(self.references), scale)))  # waits for no copy
        factor = self.limited(factors, task_norm, _norm(list(added.values()))).squeeze()
        for (device, dtype), group in by_kind(local_tensors(list(added.values()))).items():
            torch._foreach_mul_(group, factor.to(device, dtype))
        return added


def next_weight(weight: Tensor, measured: Tensor, named: Tensor, batches: int) -> Tensor:
    """Return the weight of the added gradient after a measurement: weight * (measured / named)^(GAIN / batches) >= 1.

    With the weight 1 a nat of old divergence counts as a nat of new loss. Less would spend the budget, although keeping
    costs nothing. The budget is a constraint on what is measured, and the weight is its multiplier, which rises until
    the constraint holds: dual ascent on its logarithm.

    Args:
        weight: the present one.
        measured: on one batch of the gauges; infinite if the outputs are not finite.
        named: the budget.
        batches: the number of batches of the gauges, which are measured in turn.

    Example:
        >>> one = torch.ones(2, dtype=torch.float64)
        >>> next_weight(one, torch.tensor([0.01, 0.4]).double(), 0.1 * one, batches=4)
        tensor([1.0000, 2.0000], dtype=torch.float64)
    """
    ratio = (measured / named.clamp(min=SMALLEST_BUDGET)).nan_to_num(math.inf, posinf=math.inf)
    change = ratio.clamp(1 / LARGEST_RATIO, LARGEST_RATIO) ** (GAIN / batches)
    return (weight * change).clamp(1, LARGEST_WEIGHT)


def gradients_of_divergence(
    reference: Gauge, model: nn.Module, parameters: Sequence[Tensor], index: int
) -> dict[Tensor, Tensor]:
    """Return the gradient of the mean divergence on a batch, for the parameters on which it depends."""
    shards = list(model.parameters()) if any(map(sharded, parameters)) else []  # which a forward pass may replace
    leaves = shards or (list(model.parameters()) if reference.checkpoints else [])
    with torch.enable_grad(), reference.passes(model):
        sums, counts = reference.terms(model, index)
        mean = sums.sum() / counts.sum()
        if not mean.requires_grad:
            return {}
        try:
            gradients = _gradients_of(mean, parameters, leaves)
        except RuntimeError as error:
            if reference.checkpoints or "checkpoint" not in str(error):
                raise
            reference.checkpoints = True  # reentrant checkpointing, whose gradients only a backward pass has
    if reference.checkpoints and not leaves:
        return gradients_of_divergence(reference, model, parameters, index)
    return {p: g for p, g in zip(parameters, gradients, strict=True) if g is not None}


def make_distillation(
    model: nn.Module,
    budget: Budget,
    batches: Sequence[Any],
    loss: Loss | None,
    outputs: Outputs | None,
    number_of: Sequence[int] = (),
    *,
    kind: OutputKind | None = None,
    whole: bool = False,
) -> Distillation | None:
    """Return the distillation of a budget; None if it does not distil, or the outputs are not found.

    Args:
        model: the model.
        budget: the budget.
        batches: the batches to distil.
        loss: the loss that is measured; None for the divergence.
        outputs: takes what the model returns and gives its outputs; None is as their kind finds them.
        number_of: the number of each batch in what the user gave, for error messages.
        kind: what the outputs are; None if they are not found.
        whole: whether the outputs of a sample depend on the others of its batch.
    """
    if (schedule := distilled_parts(model, budget, batches, whole=whole)) is None:
        return None
    if kind is None:
        if budget.distil and loss is not None:
            raise MooringError(
                "Budget(distil=True) does not work where the outputs are not known: give attach outputs= or a "
                "kind=, or leave distil out"
            )
        return None
    parts, every = schedule
    options: dict[str, Any] = {"outputs": outputs, "kind": kind, "whole": whole}
    gauge = Gauge(parts, **options)
    gauge.record(model, number_of=_numbers_of_parts(batches, parts, number_of))
    rounds = 0 if whole else mixture_rounds(budget, sum(map(count_inputs, parts)))
    if rounds and _predicts_once(gauge):
        mixed = Gauge(MixedBatches(parts, rounds), **options)
        mixed.record(model, known=gauge)
        gauge = mixed
    return Distillation([gauge], every)


def distilled_parts(
    model: nn.Module, budget: Budget, batches: Sequence[Any], *, whole: bool = False
) -> tuple[Sequence[Any], int] | None:
    """Return the parts of batches that a step distils, and the number of steps from one to the next; None for none.

    With `whole` no batch is split.
    """
    if not (DISTILS_BY_DEFAULT if budget.distil is None else budget.distil):
        return None
    if budget.distil is True:
        return batches, 1
    return distillation_schedule(model, batches, whole=whole)


def mixture_rounds(budget: Budget, inputs: int) -> int:
    """Return the number of mixtures of each batch that are distilled, of so many inputs together.

    Example:
        >>> mixture_rounds(Budget(0.1), 64), mixture_rounds(Budget(0.1), 700)
        (16, 3)
        >>> mixture_rounds(Budget(0.1, distil="unmixed"), 64)
        0
    """
    return 0 if budget.distil == "unmixed" or not inputs else min(math.ceil(MIXED_INPUTS / inputs), MOST_ROUNDS)


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
    rows = ((batch, t[0]) for batch, t in pairs if not isinstance(t, float))
    return all(isinstance(t, Tensor) and len(t) == count_inputs(batch) for batch, t in rows)


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
        shards: all parameters of the model, if some are sharded or layers are checkpointed: gradients exist only where
            the backward pass leaves them, in `grad`; of shards as a mean over ranks.
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
