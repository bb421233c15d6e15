"""Gauges and distillation made from the batches of a reference."""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from torch import nn

from mooring.errors import MooringError
from mooring.hold.distillation import Distillation, WeightControl
from mooring.hold.gauge import Gauge
from mooring.reference.batches import Data, Loss, Outputs, default_loss, name_batch
from mooring.reference.mixtures import MixedBatches, count_inputs
from mooring.reference.pass_cost import distillation_schedule, samples_of
from mooring.reference.preserve_model_state import preserve_model_state
from mooring.reference.rank_shares import RankShare
from mooring.reference.reference_labels import prepare_labels
from mooring.rules import Budget

DISTILS_BY_DEFAULT = True
"""Whether `Budget(distil=None)` distils."""

ROUNDS = 16
"""The number of mixtures of each batch that is distilled; they cost so many forward passes when they are recorded."""


MOST_INPUTS = 300
"""A reference that has more inputs to distil is not mixed: it shows enough by itself."""


def read_batches(model: nn.Module, data: Data, batches: int | None) -> list[Any]:
    """Read data, or call a function that makes it, and return the batches; the model does not change.

    On several ranks each reads its share, and all get the batches of all, in the order in which one process reads them.
    """
    share = RankShare(model)
    with preserve_model_state(model), share.computing(data):
        own = list(share.read(data, batches))
    return share.gather(own)


def make_gauge(
    model: nn.Module,
    batches: Sequence[Any],
    loss: Loss | None,
    outputs: Outputs | None,
    number_of: Sequence[int] = (),
) -> Gauge:
    """Return a gauge with the present predictions: the divergence, or the rise of a loss that is given.

    Without a loss, the rise of the default one is measured if the model's outputs are no distribution.
    """
    gauge = Gauge(batches, loss, outputs)
    if loss is not None:
        gauge.record(model, number_of=number_of)
        return gauge
    try:
        gauge.record(model, number_of=number_of)
    except MooringError as error:
        if error.__cause__ is not None:  # the model failed, and its outputs are not the reason
            raise
        labelled = []
        with preserve_model_state(model):
            for seed, batch in enumerate(batches):
                with name_batch(number_of[seed], loss) if number_of else nullcontext():
                    labelled.append(prepare_labels(model, batch, seed, outputs))
        gauge = Gauge(labelled, partial(default_loss, outputs=outputs), outputs)
        gauge.record(model, number_of=number_of)
    return gauge


def make_distillation(
    model: nn.Module,
    budget: Budget,
    named: float,
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
        named: its nats in the task that begins.
        batches: the batches to distil.
        loss: the loss that is measured; None for the divergence.
        outputs: takes what the model returns and gives the tensor of its outputs; None is `find_outputs`.
        control: how the weight starts and moves.
        number_of: the number of each batch in what the user gave, for error messages.
    """
    if not (DISTILS_BY_DEFAULT if budget.distil is None else budget.distil):
        return None
    if loss is not None:
        if budget.distil:
            raise MooringError("Budget(distil=True) does not work where a loss is given: leave distil out")
        return None
    parts, every = batches, 1
    if budget.distil is not True:
        parts, every = distillation_schedule(model, batches, normalized=control.normalized)
    gauge = make_gauge(model, parts, None, outputs, _numbers_of_parts(batches, parts, number_of))
    if gauge.loss is not None:
        return None
    few = sum(map(count_inputs, parts)) <= MOST_INPUTS
    if budget.distil != "unmixed" and few and _predicts_once(gauge):
        mixed = Gauge(MixedBatches(parts, ROUNDS), None, outputs)
        mixed.record(model, known=gauge.targets)
        gauge = mixed
    return Distillation([gauge], named, every, control)


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
