"""Runs that are alike in their first task, where nothing pulls yet: the gradient of one serves all of them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mooring.lab.fleet.stack.stack import Stack, laid_out
from mooring.lab.methods import find_method
from mooring.lab.model.spec import RunSpec

__all__ = ["Alike", "course"]


def course(spec: RunSpec) -> str:
    """What decides how a run moves in its first task: the key of plain fine-tuning instead.

    Methods differ in what they write down there, and act on it from the second task on. One that holds on to the start
    acts from the first step on, and is like no other.

    Example:
        >>> ewc, si, other = (RunSpec("digits", "0", *told) for told in (("ewc", 0), ("explicit-si", 0), ("ewc", 1)))
        >>> course(ewc) == course(si), course(ewc) == course(other)
        (True, False)
    """
    return spec.key if find_method(spec.method).anchors == "start" else replace(spec, method="plain", strength=None).key


@dataclass(frozen=True)
class Alike:
    """Which rows of a stack are the same so far.

    Attributes:
        rows: the first row of each kind; none where every row is a kind of its own.
        leaders: the same on the device, int64 of shape (kinds,).
        kinds: of every row, int64 of shape (runs,).

    Example:
        >>> specs = [RunSpec("digits", "0", method, seed) for method in ("plain", "explicit-si") for seed in (0, 1)]
        >>> Alike.of(specs).rows, Alike.of(specs).kinds
        ((0, 1), tensor([0, 1, 0, 1]))
    """

    rows: tuple[int, ...] = ()
    leaders: Tensor | None = None
    kinds: Tensor | None = None

    @classmethod
    def of(cls, specs: Sequence[RunSpec], device: torch.device | str = "cpu") -> "Alike":
        """Those of runs of one shape in their first task; nobody is where more is looked at than a gradient."""
        method = find_method(specs[0].method) if specs else None
        if method is None or method.observes_outputs or method.observes_layers or method.memory:
            return cls()
        courses = [course(spec) for spec in specs]
        first = {each: row for row, each in reversed([*enumerate(courses)])}
        if len(first) == len(specs):
            return cls()
        rows = tuple(sorted(first.values()))
        kinds = [rows.index(first[each]) for each in courses]
        return cls(rows, torch.tensor(rows, device=device), torch.tensor(kinds, device=device))

    @contextmanager
    def alone(self, stack: Stack) -> Iterator[None]:
        """While this lasts, the stack has the leaders only; what they keep in buffers is everyone's after that."""
        if not self.rows:
            yield
            return
        before = stack.parameters, stack.buffers, stack.seeds
        stack.parameters = {n: self.leading(p.detach()).requires_grad_(p.requires_grad) for n, p in before[0].items()}
        stack.buffers = kept = {name: self.leading(buffer) for name, buffer in before[1].items()}
        stack.seeds = [stack.seeds[row] for row in self.rows]
        try:
            yield
        finally:
            stack.parameters, stack.buffers, stack.seeds = before
        for name, buffer in kept.items():
            stack.buffers[name].copy_(self.everyones(buffer))

    def leading(self, tensor: Tensor) -> Tensor:
        """The leaders' rows of a tensor of shape (runs, ...)."""
        return _rows(tensor, self.leaders)

    def everyones(self, tensor: Tensor) -> Tensor:
        """What leaders have, of shape (kinds, ...), for every run."""
        return _rows(tensor, self.kinds)


def _rows(tensor: Tensor, rows: Tensor | None) -> Tensor:
    """Some rows, or some of them several times, as they should lie in memory; all as they are where none are named."""
    return tensor if rows is None else laid_out(tensor.index_select(0, rows))
