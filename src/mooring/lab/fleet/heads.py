"""The head that each run is evaluated with, and the heads that start from the previous one."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mooring.lab.fleet.stack.stack import Stack
from mooring.lab.methods import find_method
from mooring.lab.model.spec import RunSpec
from mooring.lab.streams.stream import Stream

__all__ = ["evaluation_heads", "inherit_heads"]


def evaluation_heads(specs: Sequence[RunSpec], stream: Stream, trained: int, tasks: int) -> list[int | Tensor]:
    """Return the head to evaluate each of the first tasks with; for a future task, the head that it would start from.

    Args:
        specs: the runs.
        stream: the tasks.
        trained: the last trained task.
        tasks: the number of tasks to evaluate.

    Returns:
        For each task one head for all runs, or heads of shape (runs,).

    Example:
        >>> from mooring.lab.streams import by_class, digits
        >>> stream = by_class(digits(), per_task=5)
        >>> specs = [RunSpec("digits", stream.fingerprint, "plain", 0, heads=heads) for heads in ("inherit", "fresh")]
        >>> evaluation_heads(specs[:1], stream, 0, 2), evaluation_heads(specs, stream, 0, 2)
        ([0, 0], [0, tensor([0, 1])])
    """
    inherits = [_inherits(spec) for spec in specs]
    heads: list[int | Tensor] = []
    for task in range(tasks):
        own, trained_head = stream.head(task), stream.head(min(task, trained))
        if own == trained_head or len({*inherits}) == 1:
            heads.append(trained_head if inherits[0] else own)
        else:
            heads.append(torch.tensor([trained_head if inherit else own for inherit in inherits]))
    return heads


def inherit_heads(stack: Stack, specs: Sequence[RunSpec], stream: Stream, task: int) -> None:
    """Start the head of a new task from the previous head, in the runs whose spec asks for it."""
    if stream.heads == "per task":
        rows = [row for row, spec in enumerate(specs) if _inherits(spec)]
        stack.inherit(task, task - 1, None if len(rows) == len(specs) else torch.tensor(rows, dtype=torch.int64))


def _inherits(spec: RunSpec) -> bool:
    return spec.heads == "inherit" and find_method(spec.method).data != "joint"
