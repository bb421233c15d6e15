"""Estimation: what matters to a model as it is, from data or from what it says itself, without taking a step."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mooring.distributed.collectives import world_size
from mooring.errors import MooringError, NonFiniteError
from mooring.importance import Importance
from mooring.observe.layer_observer import LayerObserver, watches
from mooring.observe.output_observer import OutputObserver
from mooring.pulls import Interpolation
from mooring.reference.batches import HOW, Data, Outputs, batches_of, labelled
from mooring.reference.losses import Loss, default_loss, scalar_loss
from mooring.reference.preserve_model_state import preserve_model_state
from mooring.reference.progress import progress
from mooring.state.mooring_state import MooringState, ParameterState
from mooring.step import TrainingStep

__all__ = ["check_estimable", "estimate"]

MEASURED = 8
"""How many of the batches are kept for calibration, which goes over them about a hundred times."""


def check_estimable(importance: Importance) -> None:
    """Refuse an importance that looks at the optimizer's steps.

    Example:
        >>> from mooring.importance import SI
        >>> check_estimable(SI())
        Traceback (most recent call last):
        ...
        mooring.errors.MooringError: SI is made of an optimizer's steps and cannot be estimated without: use ...
    """
    if importance.needs_step:
        raise MooringError(
            f"{importance.name} is made of an optimizer's steps and cannot be estimated without: use EWC(), MAS() or, "
            "for a budget, Kronecker()"
        )


def estimate(
    states: MooringState,
    watching: Sequence[OutputObserver | LayerObserver],
    data: Data,
    *,
    loss: Loss | None,
    batches: int | None,
    outputs: Outputs | None,
    show: bool | None,
) -> list[Any]:
    """Put the importance that data has at the parameters as they are in the place of `current`.

    For each batch, what happens around an optimizer's step happens around no step: nothing moves. All batches count
    alike, whatever the running average's decay, for there is no order in them. Nothing of the model is changed.

    Args:
        states: whose `current` is replaced.
        watching: who watches the training, and does not count this.
        data: batches, or a function from the model to one.
        loss: the mean loss on a batch; None is `default_loss`, with labels that the model draws where there are none.
        batches: how many at most; None is all of an iterable.
        outputs: from what the model returns to the tensor of its outputs.
        show: a progress bar; None on a terminal only.

    Returns:
        The first few batches, to calibrate a budget with.
    """
    check_estimable(states.importance)
    if world_size() > 1:
        raise MooringError(
            "data would be seen by one rank only: estimate in one process, and load its state_dict() in all of them"
        )
    model, optimizer = states.model, states.optimizer
    measured: list[Any] = []
    importance = states.importance.averaged()
    memory = replace(states.memory, current=None)  # a mean, which is kept in full until it is known
    look = MooringState(model, optimizer, importance, states.merge, states.exclude, memory)
    look.tasks = states.tasks
    watch, layers = watches(look, outputs)
    step = TrainingStep(look, Interpolation(), watch, layers, "follow", True)
    for other in watching:
        other.paused = True
    try:
        with preserve_model_state(model, moves=False):
            found = batches_of(data, model, batches)
            for batch in progress(found, "estimating importance", _length(data, batches), show=show):
                if loss is None:
                    with _fitting(look.steps):
                        batch = labelled(model, batch, look.steps, outputs)
                with torch.enable_grad():
                    with _fitting(look.steps):
                        value = scalar_loss(loss or default_loss(outputs), model, batch)
                    _check(value)
                    value.backward()  # type: ignore[no-untyped-call]
                step.before(optimizer, (optimizer,), {})
                step.after(optimizer, (optimizer,), {})
                for p in model.parameters():
                    p.grad = None
                if len(measured) < MEASURED:
                    measured.append(batch)
    finally:
        for other in watching:
            other.paused = False
        for own in (watch, layers):
            if own:
                own.remove()
    if not measured:
        raise MooringError("data has no batches: give some of what the model knows")
    if not look.records:
        raise MooringError("the loss on data depends on no moored parameter: compute it with the model given")
    if not any(_matters(m) for m in look.records.values()):
        raise MooringError(f"every importance that data gives is 0, and nothing would be held: {HOW}")
    _replace(states, look)
    states.unseen = {*states.names.values()} - {states.names[p] for p in states.trained()}
    return measured


def _matters(m: ParameterState) -> bool:
    """Whether the loss changes with a parameter at all."""
    return bool((m.factor.outputs if m.factor else m.state["current"]).any())


@contextmanager
def _fitting(number: int) -> Iterator[None]:
    """What torch says of shapes and labels that do not fit, with the batch that it is about."""
    try:
        yield
    except (RuntimeError, IndexError, ValueError) as error:
        if isinstance(error, MooringError | torch.OutOfMemoryError):
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise MooringError(
            f"batch {number} of the data or reference does not fit ({reason}): give batches as the model is trained "
            f"with, (inputs, labels) or inputs alone; for another loss than the cross entropy {HOW}"
        ) from error


def _replace(states: MooringState, look: MooringState) -> None:
    """What was found is what is known of this task; of a parameter that the loss does not depend on, nothing."""
    for m in look.records.values():
        if not m.factor:
            m.state["current"] = states.memory.started(m.state["current"])
    for p, m in states.records.items():
        new = look.records.pop(p, None) or look.fresh(p, states.tasks)
        m.state, m.count = new.state, new.count
        if m.factor and new.factor:
            m.factor.inputs, m.factor.outputs, m.factor.looks = new.factor.inputs, new.factor.outputs, new.factor.looks
    states.records.update(look.records)


def _length(data: Any, batches: int | None) -> int | None:
    try:
        length = len(data)
    except TypeError:  # an iterator, a loader of a stream, or a function
        return batches
    return length if batches is None else min(length, batches)


def _check(value: Tensor) -> None:
    if not math.isfinite(value.item()):
        raise NonFiniteError("the loss on data is not finite; nothing was changed: look at the data and the loss")
    if not value.requires_grad:
        raise MooringError("the loss on data depends on no moored parameter: compute it with the model given")
