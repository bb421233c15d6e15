"""Estimation of importance from data at the present parameters, without a training step, and of the memory it takes."""

import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from mooring.curvature.low_rank import Product
from mooring.curvature.product_factors import factor_shapes
from mooring.errors import MooringError, NonFiniteError
from mooring.observe.layer_observer import LayerObserver
from mooring.observe.output_observer import OutputObserver
from mooring.reference.batches import LEAVE_OUT, LOSS_HINT, Data, Loss, Outputs, name_batch, scalar_loss
from mooring.reference.kinds import OutputKind
from mooring.reference.preserve_model_state import preserve_model_state, preserve_other_gradients
from mooring.reference.rank_shares import RankShare, combine_ranks, gather_objects, stop_together
from mooring.reference.reference_labels import default_loss_in_one_pass
from mooring.rules import Importance
from mooring.state.mooring_state import MooringState
from mooring.state.parameter_state import compute_dtype_of
from mooring.step import TrainingStep

MAX_ROUNDED_BATCHES = 64
"""Number of batches whose mean may be kept in bfloat16; a further one could be less than its last digit."""

NOT_FINITE = "the loss on data is not finite; nothing was changed: check the data and the loss"
NO_DEPENDENCE = "the loss on data depends on no moored parameter: compute it with the model it is given"
OWN_TARGETS = (
    "the gradient of the loss is 0 there, as it is where targets are the model's own outputs; give other targets, or "
    'importance="mas", which does not need them'
)
SWITCHED_OFF = "every adapter is switched off or merged, so nothing can be estimated: switch one on first"
ALL_FROZEN = (
    "every parameter that the optimizer has is frozen or excluded, so nothing would be held: call requires_grad_() on "
    "those that should train, before attach"
)
NOTHING_TRAINS = (
    "the parameters that the optimizer trains are empty, so nothing would be held: give adapters a rank above 0"
)


def check_estimable(importance: Importance) -> None:
    """Refuse an importance that reads the optimizer's steps.

    Example:
        >>> from mooring.rules import SI
        >>> check_estimable(SI())
        Traceback (most recent call last):
        ...
        mooring.errors.MooringError: SI needs the steps of an optimizer and cannot be estimated from data: use ...
    """
    if importance.needs_step:
        raise MooringError(
            f"{importance.name} needs the steps of an optimizer and cannot be estimated from data: use EWC(), MAS() "
            "or, for a budget, Kronecker()"
        )


def estimate(
    states: MooringState,
    observers: Sequence[OutputObserver | LayerObserver],
    data: Data,
    *,
    loss: Loss | None,
    batches: int | None,
    outputs: Outputs | None,
    show: bool | None,
    kind: OutputKind | None = None,
    number_of: Sequence[int] = (),
) -> None:
    """Replace `current` by the importance on data at the present parameters.

    For each batch the hooks around an optimizer's step run without a step, so no parameter moves. All batches have the
    same weight, whatever the decay of the running average, because they have no order. The model does not change.

    Args:
        states: the states whose `current` is replaced.
        observers: the observers of training, of this Mooring and of others, which are paused.
        data: batches, or a function from the model to a batch.
        loss: the mean loss on a batch; None is `default_loss`, with labels sampled from the model if there are none.
        batches: the largest number of batches to read; None reads all of an iterable.
        outputs: takes what the model returns and gives the tensor of its outputs.
        show: whether to show a progress bar; None shows it only on a terminal.
        kind: what the outputs are; None is classes.
        number_of: the number of each batch in what the user gave, for error messages; by default its position.
    """
    check_estimable(states.importance)
    check_memory(states)
    model, optimizer, importance = states.model, states.optimizer, states.importance.averaged()
    share, count, losses = RankShare(model), 0, dict[int, Tensor]()
    memory = replace(states.memory, current=_mean_dtype(states, _length(data, batches)))
    estimated = MooringState(model, optimizer, importance, states.merge, states.exclude, memory, states.adapters)
    estimated.tasks, estimated.observed_every, estimated.copies_anchors = states.tasks, 1, False
    step = TrainingStep(estimated, None, "follow", True, outputs)
    for observer in observers:
        observer.paused = True
    try:
        with preserve_model_state(model), share.computing(data):
            read = share.read(data, batches)
            length = share.length(_length(data, batches))
            shown = progress(read, "estimating importance", length, show=False if share.rank else show)
            for number, batch in enumerate(shown):
                estimated.steps = share.rank + number * share.world  # as one process would count
                with torch.enable_grad():
                    given = number_of[estimated.steps] if number_of else estimated.steps
                    with name_batch(given, loss):
                        if loss is None:
                            value = default_loss_in_one_pass(model, batch, estimated.steps, outputs, kind)
                        else:
                            value = scalar_loss(loss, model, batch, outputs)
                    losses[given] = value.detach()
                    if not share.together and value.device.type == "cpu":  # else all ranks see the gradient
                        _check_losses(losses)
                    if not value.requires_grad:
                        raise MooringError(SWITCHED_OFF if estimated.products.switched_off else _unheld(estimated))
                    with preserve_other_gradients(value, model):
                        value.backward()  # type: ignore[no-untyped-call]
                    del value  # the hooks of its graph hold the inputs of all layers, beside those of the next batch
                with _name_losses(losses):
                    step.before(optimizer, (optimizer,), {})
                step.after(optimizer, (optimizer,), {})
                for p in model.parameters():
                    p.grad = None
                count += 1
            with _name_losses(losses):
                step.report_bad_gradients()
            if not share.together:
                _check_losses(losses)
    finally:
        for observer in observers:
            observer.paused = False
        for temporary in step.observers:
            temporary.remove()
    if not any(gather_objects(count)):
        raise MooringError("data has no batches: give batches that show what the model knows")
    if share.world > 1 and not share.together:
        combine_ranks(estimated)
    if not any(p.numel() for p in estimated.records):
        raise MooringError(NOTHING_TRAINS if estimated.records else _unheld(estimated))
    records = estimated.records.values()
    scores = (m.factors.outputs if m.factors and m.factors.count else m.importance_state["current"] for m in records)
    if not any(bool(score.any()) for score in scores):
        remedy = LOSS_HINT if loss is None else OWN_TARGETS
        raise MooringError(f"every importance on data is 0, so nothing would be held: {remedy}")
    _replace(states, estimated)
    states.not_estimated = {*states.names.values()} - {states.names[p] for p in states.trained()}


def _unheld(estimated: MooringState) -> str:
    """Return why a loss depends on no parameter that could be held."""
    return NO_DEPENDENCE if estimated.trained() else ALL_FROZEN


def _mean_dtype(states: MooringState, batches: int | None) -> torch.dtype | None:
    """Return the dtype of the mean of scores until it is complete; None for that of the computation.

    In bfloat16 each of few batches adds to a mean as it should, and the sum of many roundings is less than that of the
    eight bits in which it is kept.
    """
    half = all(p.dtype == torch.bfloat16 for p in states.trained())
    few = batches is not None and batches <= MAX_ROUNDED_BATCHES
    return torch.bfloat16 if half and few and states.memory.previous == "8bit" else None


def _check_losses(losses: dict[int, Tensor]) -> None:
    """Refuse losses that are not finite, with the number of the batch, and forget the others; waits for the device."""
    values = torch.stack([*losses.values()]).tolist() if losses else []
    if bad := [number for number, value in zip(losses, values, strict=True) if not math.isfinite(value)]:
        raise NonFiniteError(f"the loss on batch {bad[0]} of the data or reference is not finite; {LEAVE_OUT}")
    losses.clear()


@contextmanager
def _name_losses(losses: dict[int, Tensor]) -> Iterator[None]:
    """Name the loss, if it is not finite, instead of the gradient that it made so."""
    try:
        yield
    except NonFiniteError:
        _check_losses(losses)
        raise


def _replace(states: MooringState, estimated: MooringState) -> None:
    """Take over the estimate; a parameter that the loss does not depend on starts afresh."""
    for m in estimated.records.values():
        if m.has_scores:
            m.importance_state["current"] = states.memory.store_current(m.importance_state["current"])
    for p, m in states.records.items():
        new = estimated.records.pop(p, None) or estimated.new_state(p, states.tasks)
        if not new.factors:
            states.to_scores(m)
        if not m.factors:
            estimated.to_scores(new)  # which keeps scores, even if training does not
        m.importance_state, m.count = new.importance_state, new.count
        if m.factors and new.factors:
            for name in ("inputs", "outputs", "count"):
                setattr(m.factors, name, getattr(new.factors, name))
    for m in estimated.records.values():
        m.anchor = states.memory.new_anchor(m.theta)
        m.choose_dtype()
    states.records.update(estimated.records)
    states.diagonal_reasons |= estimated.diagonal_reasons


def _length(data: Any, batches: int | None) -> int | None:
    try:
        length = len(data)
    except TypeError:  # an iterator, a loader of a stream or a function
        return batches
    return length if batches is None else min(length, batches)


def estimated_bytes(states: MooringState) -> dict[torch.device, int]:
    """Return the bytes on each device that an estimate of importance will allocate, without activations.

    These are gradients, anchors, the importance on the data and that over past tasks, and Kronecker factors with their
    eigenbases. Of parameters whose state exists, only what is new counts.
    """
    total: dict[torch.device, int] = {}
    for p in states.trained():
        total[p.device] = total.get(p.device, 0) + _bytes(states, p)
    return total


def _bytes(states: MooringState, p: Tensor) -> int:
    size, width = p.numel(), compute_dtype_of(p).itemsize
    gradient = 0 if p.grad is not None else size * p.itemsize
    known = states.records.get(p)
    anchor = 0 if states.memory.host or known else size * (states.memory.anchor or p.dtype).itemsize
    if p in states.products:
        return gradient + anchor + _product_bytes(states, p, width)
    if p in states.with_factors and not (known and known.factors is None):
        new = states.new_factors(p)  # zeros, which take no memory
        squares = new.inputs.numel() + new.outputs.numel()
        return gradient + anchor + width * (3 * squares + size)  # of this task, of past tasks, and the eigenbasis
    return gradient + anchor + width * size * (1 if known and known.previous is not None else 2)


def _product_bytes(states: MooringState, p: Tensor, width: int) -> int:
    """Return the bytes of the factors of a low-rank product; its B has those of both parameters."""
    if p not in states.products.by_b or not isinstance(states.adapters, Product):
        return 0
    shapes = factor_shapes(states.products.by_b[p], states.adapters.largest)
    inputs, outputs = (torch.Size(shape).numel() for shape in shapes)
    kept = states.adapters.dtype.itemsize if states.adapters.dtype else width
    return (width + kept) * (inputs + outputs) + kept * (outputs if len(shapes[1]) > 1 else 0)


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that can still be allocated on a device; None if that is not known."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def check_memory(states: MooringState) -> None:
    """Refuse parameters without values, and an estimate that does not fit into memory, before anything is read.

    Every rank must call this.

    GPUs differ in free memory. If one rank refused alone, the others would wait for it to read its share.
    """
    if meta := [states.names[p] for p in states.trained() if p.is_meta]:
        raise MooringError(f"{meta[0]!r} is on the meta device and has no values: load the model's weights first")
    error: MooringError | None = None
    for device, needed in estimated_bytes(states).items():
        if (free := free_bytes(device)) is not None and needed > free:
            remedy = "exclude some parameters, or give memory=Memory(host=True)"
            if states.products:
                remedy = "give adapters=Product(largest=512, dtype=torch.bfloat16), or exclude some parameters"
            elif states.importance.by_layer:
                remedy = f"give {states.importance.name}(blocks=512), or exclude some parameters"
            error = MooringError(
                f"the reference needs {needed / 1e9:.1f} GB on {device} besides activations, and {free / 1e9:.1f} GB "
                f"are free: {remedy}"
            )
    stop_together(error, "has too little memory")


T = TypeVar("T")
WIDTH = 24


def progress(items: Iterable[T], what: str, total: int | None, *, show: bool | None = None) -> Iterator[T]:
    """Iterate with a progress bar on stderr, which is cleared at the end.

    Args:
        items: what to iterate over.
        what: the name of the activity.
        total: the number of items; None if it is not known.
        show: whether to draw the bar; None draws it only on a terminal.

    Example:
        >>> list(progress("ab", "reading", 2))
        ['a', 'b']
    """
    if not (sys.stderr.isatty() if show is None else show):
        yield from items
        return
    start, length = time.monotonic(), 0

    def line(done: int) -> str:
        elapsed = time.monotonic() - start
        if not total:
            return f"{what} {done}, {elapsed:.0f} s"
        full = WIDTH * min(done, total) // total
        left = f", {elapsed / done * max(total - done, 0):.0f} s left" if done else ""
        return f"{what} [{'=' * full}{' ' * (WIDTH - full)}] {done}/{total}{left}"

    try:
        for done, item in enumerate(items):
            text = line(done)
            print(f"\r{text:<{length}}", end="", file=sys.stderr, flush=True)
            length = len(text)
            yield item
    finally:
        print(f"\r{'':<{length}}\r", end="", file=sys.stderr, flush=True)
