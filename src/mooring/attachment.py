"""`mooring.attach`: checks its options and returns a Mooring."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

from mooring.curvature.low_rank import Product, find_products
from mooring.distributed.dtensor import check_sharding
from mooring.errors import MooringError, UnheldWarning, warn
from mooring.mooring import Mooring
from mooring.optimizers import check_optimizer, unwrap_optimizer, warn_of_other_budgets
from mooring.reference.batches import Data, Loss
from mooring.reference.estimation import check_estimable
from mooring.reference.kinds import Kind, choose_kind
from mooring.rules import Budget, Importance, Pull, merges
from mooring.state.chosen_rules import choose_rules
from mooring.state.memory import Memory
from mooring.state.selection import Exclude, check_exclude, module_names, tied_by_exclusion


class UnreadReference(list[Any]):
    """A reference that is not read, because the state that is loaded next stands for it."""


def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    importance: str | Importance | None = None,
    pull: Pull | None = None,
    exclude: Exclude = (),
    buffers: Literal["follow", "frozen"] | None = None,
    merge: str | merges.Merge | None = None,
    adapters: Literal["product", "parameters"] | Product | None = None,
    outputs: Callable[[Any], Any] | None = None,
    kind: Kind | None = None,
    memory: Memory | None = None,
    check_finite: bool | Literal["wait"] = True,
    reference: Data | None = None,
    loss: Loss | None = None,
    batches: int | None = 32,
    progress: bool | None = None,
) -> Mooring:
    """Moor a model to what it knows while an optimizer trains it further.

    With a reference, which shows what the model knows, each `optimizer.step()` also pulls the parameters back towards
    their present values, the anchors. Without one nothing is held in the first task; `Mooring.consolidate()` ends a
    task, and what it learned is held from then on. The training loop does not change. If a saved state is loaded
    afterwards, it decides the importance, pull, merge and buffers that are not named here.

    Args:
        model: the model to train.
        optimizer: any `torch.optim.Optimizer` over all or some of its parameters, prepared by Accelerate or not. Each
            Mooring needs its own optimizer.
        importance: "ewc" (the default), "mas", "si", "rwalk", "uniform", "random", "kronecker" (only with a
            `Budget`), or an instance with options. With a `Budget` the default is the Fisher information,
            `EWC(decay=None, per_sample=True)`.
        pull: `Interpolation()` by default, which has no strength to tune; with a reference `Budget(0.1)`, which leaves
            more room to learn and is measured on the reference, or `Budget(0.03)` if low-rank adapters train (also with
            `Memory(current="none")`, which `Interpolation()` cannot use); or
            `Penalty(...)`, `Proximal(...)`.
        exclude: parameters that stay free, such as new heads: names, glob patterns or modules. A tied parameter, such
            as the embedding that is also a language model's head, is free if any of its names is excluded; a warning
            names it unless all of them are.
        buffers: running statistics of normalisation layers once a task was consolidated: "follow" the new data (the
            default), and are merged with those before if the pull merges weights (every="task"); "frozen" ones (the
            default with a reference) stay as they are, and layers normalise with them in training mode too.
        merge: how the importance of a finished task is combined with that of the tasks before: "average" (the paper's,
            and the default), "sum" (the default with a `Budget`), "max", or a function.
        adapters: how low-rank adapters, such as LoRA layers, are held: through their "product", the change of the base
            weights, by their own "parameters", or `mooring.Product(...)` with options. By default through
            their product where importance and pull allow it, such as a `Budget` with a curvature.
        outputs: takes what the model returns and gives the tensor of its outputs, if that is not the first tensor, or
            its `logits`; of any form with a divergence of your own as kind.
        kind: what the outputs are, which says how forgetting is measured and how the reference is distilled: "classes",
            "labels" (independent logits), "values" (regression), "embedding", an instance such as
            `mooring.kinds.Classes(dimension=1)`, or a function divergence(old_outputs, new_outputs). By default it is
            inferred, which `print(moor)` says, and the first training step warns if the loss does not fit it.
        memory: dtype and device of anchors and importances, `mooring.Memory(...)`. By default anchors have their
            parameter's dtype, and importances have float32 or that dtype if it is wider. With a reference and a
            measured budget, or `Kronecker()`, the default is `Memory(current="none")`: training accumulates no
            importance, so that a later `consolidate()` needs data. Give `Memory()` to accumulate it.
        check_finite: stop before a step whose gradient is not finite. On a GPU that step is taken with a gradient of 0
            and the next one raises, so that the host need not wait; "wait" stops before it there, too.
        reference: data that shows what the model knows, to fine-tune it without forgetting that: batches of (inputs,
            labels) or of inputs alone, or a function from the model to a batch, such as sequences that it generates.
            A measured budget holds a third of them out to measure on, unless they are very few.
            The importance is estimated on it and the anchors are the present parameters, as
            `Mooring.consolidate(data=reference)` does before any step. The model does not change.
        loss: the mean loss of a model on a batch of the reference, loss(model, batch); by default the cross entropy.
        batches: the largest number of batches to read from the reference; None reads all.
        progress: whether to show a progress bar on stderr; by default only on a terminal.

    Returns:
        The `Mooring`. Call its `finish()` before you test or save a model that was trained with a reference, and its
        `consolidate()` at the end of each task if others follow.

    Example:
        >>> import mooring
        >>> model = nn.Linear(3, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> moor = attach(model, optimizer, importance="mas", pull=mooring.Proximal(strength=3.0))
        >>> for task in range(2):
        ...     for _ in range(5):
        ...         optimizer.zero_grad()
        ...         model(torch.randn(8, 3)).square().mean().backward()
        ...         optimizer.step()
        ...     moor.consolidate()
        >>> moor
        Mooring(MAS(decay=0.2), Proximal(strength=3.0), parameters=2, tasks=2)

        For a model that is already trained, give a reference:

        >>> moor.detach()
        >>> moor = attach(model, optimizer, reference=[torch.randn(8, 3) for _ in range(4)])
        >>> moor.tasks
        1
    """
    for value, expected in ((model, nn.Module), (optimizer, torch.optim.Optimizer)):
        if not isinstance(value, expected):
            raise MooringError(
                f"attach takes a model, then its optimizer: expected {expected.__name__}, got {type(value).__name__}"
            )
    if torch.is_inference_mode_enabled():
        raise MooringError(
            "attach does not work in torch.inference_mode(), whose tensors cannot train: call it outside, or use "
            "torch.no_grad()"
        )
    optimizer = unwrap_optimizer(optimizer)
    adapted = any(b.requires_grad for b in find_products(module_names(model), {*model.parameters()}).by_b)
    if memory is not None and not isinstance(memory, Memory):
        raise MooringError(f"memory={memory!r} is not allowed: give mooring.Memory(...)")
    lean = memory is not None and not memory.accumulates
    options = {"reference": reference is not None, "adapted": adapted, "lean": lean}
    rules = choose_rules(importance, pull, merge, buffers, adapters, **options)
    measured = isinstance(rules.pull, Budget) and rules.pull.measured
    if memory is None and reference is not None and (measured or rules.importance.by_layer):
        memory = Memory(current="none")  # with one task after a reference, its importance is not read
    memory = memory or Memory()
    rules.check(memory)
    excluded = check_exclude(model, exclude)
    _warn_of_ties(model, excluded)
    check_optimizer(model, optimizer, excluded)
    held = [p for group in optimizer.param_groups for p in group["params"]]
    check_sharding(model, rules.importance, held, rows=memory.previous == "8bit")
    if reference is not None:
        check_estimable(rules.importance)
    elif loss is not None:
        raise MooringError("loss has no effect without a reference: give attach both or neither")
    moor = Mooring(
        model,
        optimizer,
        rules=rules,
        exclude=excluded,
        outputs=outputs,
        memory=memory,
        check_finite=check_finite,
        kind=None if kind is None else choose_kind(kind),
    )
    moor._loss = loss
    warn_of_other_budgets(moor._step)
    if reference is not None and not isinstance(reference, UnreadReference):
        try:
            moor.consolidate(data=reference, loss=loss, batches=batches, progress=progress)
        except BaseException:
            moor.detach()
            raise
    return moor


def _warn_of_ties(model: nn.Module, exclude: tuple[str, ...]) -> None:
    """Warn of parameters that are excluded by one name and known by another, such as a head tied to an embedding."""
    if ties := tied_by_exclusion(model, exclude):
        kept, excluded = ties[0]
        warn(
            f"exclude frees {kept!r} too, because it is tied to {excluded!r}: to hold it leave {excluded!r} out of "
            f"exclude; to free it on purpose exclude {kept!r} as well",
            UnheldWarning,
        )
