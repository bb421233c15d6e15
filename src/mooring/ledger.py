"""What is kept for each moored parameter, and since when."""

import torch
from torch import Tensor, nn

from mooring.checkpoint import Moored
from mooring.errors import MooringError
from mooring.importance import Importance, State
from mooring.merges import Merge
from mooring.selection import layer_of, moorable

__all__ = ["Ledger"]


RESERVED = {"anchor", "before", "buffer", "g", "previous", "probe", "theta"}
"""Names of what is known of a parameter in a step; an importance's own state has others."""


class Ledger:
    """The records of a model's moored parameters, made when a parameter gets its first gradient.

    Args:
        model: whose parameters they are.
        optimizer: which of them it trains.
        importance: what is kept of a task.
        merge: how a finished task joins the past.
        exclude: what is left free, checked.
        state_dtype: dtype of what is kept; None is float32, or the parameter's own where wider.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        importance: Importance,
        merge: Merge,
        exclude: tuple[str | nn.Module, ...],
        state_dtype: torch.dtype | None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.importance = importance
        self.merge = merge
        self.exclude = exclude
        self.state_dtype = state_dtype
        self.tasks = 0
        self.steps = 0
        self.records: dict[Tensor, Moored] = {}
        self.names: dict[Tensor, str] = {}
        self._held = 0
        self.refresh()

    def refresh(self) -> None:
        """Look at the model again: parameters may have appeared, or left."""
        self.names = moorable(self.model, self.exclude)
        self.records = {p: m for p, m in self.records.items() if p in self.names}

    def trained(self) -> list[Tensor]:
        """The parameters that this optimizer trains and that are not excluded."""
        held = [p for group in self.optimizer.param_groups for p in group["params"]]
        if len(held) != self._held:  # a parameter group was added
            self._held = len(held)
            self.refresh()
        return [p for p in held if p.requires_grad and p in self.names]

    def adopt(self, p: Tensor) -> Moored | None:
        """The record of a parameter, new if need be; None where it is not to be moored."""
        if p in self.records:
            return self.records[p]
        if p not in self.names:
            self.refresh()
        if p not in self.names:
            return None
        if p.is_complex() or (p.grad is not None and p.grad.layout != torch.strided):
            kind = "is complex" if p.is_complex() else "has a sparse gradient"
            raise MooringError(f"{self.names[p]!r} {kind}, which cannot be moored: exclude it")
        self.records[p] = self.fresh(p, self.tasks)
        return self.records[p]

    def fresh(self, p: Tensor, task: int) -> Moored:
        """A record that starts here: anchored where the parameter is, free because nothing is known of the past."""
        dtype = self.state_dtype or torch.promote_types(p.dtype, torch.float32)
        anchor = torch.empty_like(p, dtype=dtype, requires_grad=False).copy_(p.detach())
        state = self.importance.start(anchor, name=self.names[p], task=task)
        if "current" not in state or RESERVED & state.keys():
            raise MooringError(
                f"{self.importance.name}.start must give 'current' and none of {', '.join(sorted(RESERVED))}"
            )
        return Moored(self.names[p], p, anchor, state)

    def consolidate(self) -> None:
        """anchor <- parameter; previous <- merge(previous, current); a new task begins."""
        self.refresh()
        for p in self.trained():
            self.adopt(p)
        factors = self.factors()
        for m in self.records.values():
            if m.count or not self.importance.merges:
                current = m.state["current"] * factors.get(layer_of(m.name), 1.0)
                past = torch.zeros_like(current) if m.previous is None else m.previous
                m.previous = self.merge(past, current) if self.importance.merges else current
            m.anchor.copy_(m.parameter)
            m.state = self.importance.start(m.anchor, name=m.name, task=self.tasks + 1)
            m.count = 0
        self.tasks += 1
        self.steps = 0

    def factors(self) -> State:
        """A factor for the scores of each layer, where the importance is balanced; else nothing."""
        if not self.importance.balances or not self.records:
            return {}
        sums: dict[str, Tensor] = {}
        sizes: dict[str, int] = {}
        for m in self.records.values():
            layer, score = layer_of(m.name), m.full(m.state["current"]).abs().sum()
            sums[layer] = sums[layer] + score if layer in sums else score
            sizes[layer] = sizes.get(layer, 0) + m.parameter.numel()
        return dict(zip(sums, self.importance.factors(list(sums.values()), list(sizes.values())), strict=True))
