"""Runs whose first task is identical, because no pull acts yet: one gradient serves all of them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mooring_lab.fleet.stack.stack import Stack, to_stack_layout
from mooring_lab.model.known_methods import find_method
from mooring_lab.model.spec import RunSpec


def first_task_key(spec: RunSpec) -> str:
    """Return the key that runs share when their parameters are the same throughout the first task.

    It is the key of plain fine-tuning with the same settings: methods collect their importance in the first task and
    use it from the second task on. A method whose strength acts from the first step keeps its own key.

    Example:
        >>> ewc, si, other = (RunSpec("digits", "0", *run) for run in (("ewc", 0), ("explicit-si", 0), ("ewc", 1)))
        >>> first_task_key(ewc) == first_task_key(si), first_task_key(ewc) == first_task_key(other)
        (True, False)
    """
    method = find_method(spec.method)
    if method.strength_acts_at_once:
        return spec.key
    decay = spec.weight_decay + method.first_decay
    return replace(spec, method="plain", strength=None, weight_decay=decay).key


@dataclass(frozen=True)
class GradientSharing:
    """Groups of rows of a stack that have the same parameters so far, each with a representative.

    Attributes:
        rows: the first row of each group, its representative; empty if no rows share.
        representatives: the same on the device, int64 of shape (groups,).
        groups: the group of every row, int64 of shape (runs,).

    Example:
        >>> specs = [RunSpec("digits", "0", method, seed) for method in ("plain", "explicit-si") for seed in (0, 1)]
        >>> GradientSharing.of(specs).rows, GradientSharing.of(specs).groups
        ((0, 1), tensor([0, 1, 0, 1]))
    """

    rows: tuple[int, ...] = ()
    representatives: Tensor | None = None
    groups: Tensor | None = None

    @classmethod
    def of(cls, specs: Sequence[RunSpec], device: torch.device | str = "cpu") -> "GradientSharing":
        """Group runs that share first-task gradients; empty if the method reads outputs, layers or replay.

        Args:
            specs: the runs of a fleet in its first task; none in later tasks.
            device: where the fleet computes.
        """
        method = find_method(specs[0].method) if specs else None
        if method is None or method.observes_outputs or method.observes_layers or method.memory:
            return cls()
        keys = [first_task_key(spec) for spec in specs]
        first = {key: row for row, key in reversed([*enumerate(keys)])}
        if len(first) == len(specs):
            return cls()
        rows = tuple(sorted(first.values()))
        groups = [rows.index(first[key]) for key in keys]
        return cls(rows, torch.tensor(rows, device=device), torch.tensor(groups, device=device))

    @contextmanager
    def representatives_only(self, stack: Stack) -> Iterator[None]:
        """Reduce the stack to the representatives inside this context; every run gets their buffers at the end."""
        if not self.rows:
            yield
            return
        before = stack.parameters, stack.buffers, stack.seeds
        stack.parameters = {n: self.select(p.detach()).requires_grad_(p.requires_grad) for n, p in before[0].items()}
        stack.buffers = updated = {name: self.select(buffer) for name, buffer in before[1].items()}
        stack.seeds = [stack.seeds[row] for row in self.rows]
        try:
            yield
        finally:
            stack.parameters, stack.buffers, stack.seeds = before
        for name, buffer in updated.items():
            stack.buffers[name].copy_(self.expand(buffer))

    def select(self, tensor: Tensor) -> Tensor:
        """Return the representatives' rows of a tensor of shape (runs, ...)."""
        return _take_rows(tensor, self.representatives)

    def expand(self, tensor: Tensor) -> Tensor:
        """Repeat the representatives' rows, of shape (groups, ...), for every run."""
        return _take_rows(tensor, self.groups)


def _take_rows(tensor: Tensor, rows: Tensor | None) -> Tensor:
    return tensor if rows is None else to_stack_layout(tensor.index_select(0, rows))
