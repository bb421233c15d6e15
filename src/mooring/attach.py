"""Binds a model and an optimizer to an importance and a pull: what `mooring.attach` checks and returns."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mooring.distributed.dtensor import check_rows, check_sharding
from mooring.errors import MooringError, unknown
from mooring.importance import EWC, Importance, resolve
from mooring.moor import Mooring
from mooring.optimizers import check_optimizer, stepping
from mooring.pulls import Budget, GradientPull, Interpolation, ParameterPull, Pull, merges
from mooring.reference.batches import Data
from mooring.reference.estimation import check_estimable
from mooring.reference.losses import Loss
from mooring.state.memory import Memory
from mooring.state.selection import Exclude, check_exclude

__all__ = ["attach"]

BUFFERS = ("follow", "keep", "interpolate")

NATS = 0.1
"""What may be forgotten by default of what a reference shows: a tenth of a nat of its loss."""


def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    importance: str | Importance | None = None,
    pull: Pull | None = None,
    exclude: Exclude = (),
    buffers: Literal["follow", "keep", "interpolate"] = "follow",
    merge: str | merges.Merge | None = None,
    outputs: Callable[[Any], Tensor] | None = None,
    state_dtype: torch.dtype | None = None,
    memory: Memory | None = None,
    check_finite: bool = True,
    reference: Data | None = None,
    loss: Loss | None = None,
    batches: int | None = 32,
    progress: bool | None = None,
) -> Mooring:
    """Moor a model to what it knows while an optimizer trains it further.

    From now on each `optimizer.step()` also updates the importance of each parameter on the current task and,
    once a task was consolidated, pulls parameters back to where they were. The training loop stays as it is.

    Args:
        model: the model that is trained.
        optimizer: any `torch.optim.Optimizer` over (some of) its parameters, prepared by Accelerate or not; one Mooring
            for each optimizer.
        importance: "ewc" (the default), "mas", "si", "rwalk", "uniform", "random", or an instance with options. With a
            `Budget` the default is the Fisher information, `EWC(decay=None, per_sample=True)`.
        pull: `Interpolation()` by default, which has no strength to tune; with a reference `Budget(0.1)`, which leaves
            more room to learn and is calibrated by it; `Penalty(...)`, `Proximal(...)`.
        exclude: what is left free, such as heads: names, glob patterns or modules.
        buffers: running statistics of normalisation layers once a task was consolidated: "follow" the new
            data, "keep" the old ones, or "interpolate" half-way in each iteration.
        merge: how a finished task's importance joins the past's: "average" (the paper's, and the default), "sum" (the
            default with a `Budget`), "max", or a function.
        outputs: from what the model returns to the tensor of outputs, for importances that look at them.
        state_dtype: one dtype of anchors and importances; in the place of `memory`.
        memory: in what form anchors and importances are kept, and where: `mooring.Memory(...)`. By default anchors in
            their parameter's own dtype, and importances in float32, or that dtype where wider.
        check_finite: stop before a step whose gradient is not finite (costs one reduction and, on a GPU,
            one synchronisation per step).
        reference: what the model knows already, to fine-tune it without forgetting that: batches of (inputs, labels),
            or of inputs alone, or a function from the model to a batch, such as one of sequences that it generates.
            The importance is estimated from it, and anchors are the parameters as they are: this is
            `Mooring.consolidate(data=reference)` before any step. Nothing about the model changes.
        loss: the mean loss of a model on a batch of the reference, loss(model, batch); by default the cross entropy.
        batches: how many batches of the reference at most; None is all of them.
        progress: whether to show a bar on stderr meanwhile; by default on a terminal only.

    Returns:
        The `Mooring`, with `consolidate()` to call at the end of each task.

    Example:
        >>> model = nn.Linear(3, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> moor = attach(model, optimizer, importance="mas")
        >>> for task in range(2):
        ...     for _ in range(5):
        ...         optimizer.zero_grad()
        ...         model(torch.randn(8, 3)).square().mean().backward()
        ...         optimizer.step()
        ...     moor.consolidate()
        >>> moor
        Mooring(MAS(decay=0.2), Interpolation(stiffness=1.0, every=1, root=2, weight=1.0), parameters=2, tasks=2)

        One task alone, for a model that is trained already:

        >>> moor.detach()
        >>> moor = attach(model, optimizer, reference=[torch.randn(8, 3) for _ in range(4)])
        >>> moor.tasks
        1
    """
    for thing, wanted in ((model, nn.Module), (optimizer, torch.optim.Optimizer)):
        if not isinstance(thing, wanted):
            raise MooringError(
                f"attach takes a model, then its optimizer: {type(thing).__name__} is no {wanted.__name__}"
            )
    optimizer = stepping(optimizer)
    if pull is None:
        pull = Interpolation() if reference is None else Budget(NATS)
    curved = isinstance(pull, Budget)
    if importance is None:
        importance = EWC(decay=None, per_sample=True) if curved else EWC()
    importance = resolve(importance)
    if not isinstance(pull, GradientPull | ParameterPull | Budget):
        raise MooringError(f"pull={pull!r} is not a pull: give an instance such as Interpolation() or Penalty(100.0)")
    for name in ("strength", "nats"):
        given = getattr(pull, name, None)
        if isinstance(given, Tensor) and given.ndim:
            raise MooringError(f"{name}={given.tolist()} is one for each run: give a single model a single number")
    if buffers not in BUFFERS:
        raise unknown("buffers", buffers, BUFFERS)
    if state_dtype is not None and not state_dtype.is_floating_point:
        raise MooringError(f"state_dtype={state_dtype} is not allowed: give a floating-point dtype")
    if state_dtype is not None and memory is not None:
        raise MooringError("state_dtype and memory say the same thing: give attach one of them")
    if memory is not None and not isinstance(memory, Memory):
        raise MooringError(f"memory={memory!r} is not allowed: give mooring.Memory(...)")
    memory = memory or Memory(anchor=state_dtype, previous=state_dtype, current=state_dtype)
    memory.check(importance, pull)
    if importance.by_layer and (not curved or merge not in (None, "sum", merges.total)):
        raise MooringError(
            f"{importance.name}() is for a budget, and its tasks are summed: give pull=Budget(...), and no merge"
        )
    merge = merges.resolve(merge or ("sum" if curved else "average"))
    excluded = check_exclude(model, exclude)
    check_optimizer(model, optimizer, excluded)
    held = [p for group in optimizer.param_groups for p in group["params"]]
    check_sharding(model, importance, held)
    if memory.previous == "8bit":
        check_rows(held)
    if reference is not None:
        check_estimable(importance)
    elif loss is not None:
        raise MooringError("loss has no effect without a reference: give attach both, or neither")
    moor = Mooring(
        model,
        optimizer,
        importance=importance,
        pull=pull,
        exclude=excluded,
        buffers=buffers,
        merge=merge,
        outputs=outputs,
        memory=memory,
        check_finite=check_finite,
    )
    if reference is not None:
        try:
            moor.consolidate(data=reference, loss=loss, batches=batches, progress=progress)
        except BaseException:
            moor.detach()
            raise
    return moor
