"""Which head is asked, and which one starts from the head before it: by run, where runs of a fleet differ in that."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mooring.lab.fleet.stack.stack import Stack
from mooring.lab.methods import find_method
from mooring.lab.model.spec import RunSpec
from mooring.lab.streams.stream import Stream

__all__ = ["heads_for", "inherit"]


def heads_for(specs: Sequence[RunSpec], stream: Stream, trained: int, tasks: int) -> list[int | Tensor]:
    """The head that is asked on each of the first tasks; on one to come, the head that it would start from.

    Args:
        specs: the runs.
        stream: what they go through.
        trained: the last task that was trained.
        tasks: how many are asked about.

    Returns:
        A head for each task, or heads of shape (runs,).

    Example:
        >>> from mooring.lab.streams import by_class, digits
        >>> stream = by_class(digits(), per_task=5)
        >>> specs = [RunSpec("digits", stream.fingerprint, "plain", 0, heads=heads) for heads in ("inherit", "fresh")]
        >>> heads_for(specs[:1], stream, 0, 2), heads_for(specs, stream, 0, 2)
        ([0, 0], [0, tensor([0, 1])])
    """
    inherits = [_inherits(spec) for spec in specs]
    found: list[int | Tensor] = []
    for task in range(tasks):
        own, old = stream.head(task), stream.head(min(task, trained))
        same = own == old or len({*inherits}) == 1
        found.append(
            (old if inherits[0] else own) if same else torch.tensor([old if each else own for each in inherits])
        )
    return found


def inherit(stack: Stack, specs: Sequence[RunSpec], stream: Stream, task: int) -> None:
    """A task begins: where runs say so, its head starts from the one before."""
    if stream.heads == "per task":
        rows = [row for row, spec in enumerate(specs) if _inherits(spec)]
        stack.inherit(task, task - 1, None if len(rows) == len(specs) else torch.tensor(rows, dtype=torch.int64))


def _inherits(spec: RunSpec) -> bool:
    return spec.heads == "inherit" and find_method(spec.method).data != "joint"
