"""What is kept for each moored parameter, and since when."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mooring.errors import MooringError
from mooring.factors import FACTORS, Factor, Factors, layers_with_factors
from mooring.importance import Importance, State
from mooring.merges import Merge
from mooring.selection import layer_of, moorable
from mooring.shards import local, over_shards, part_of, spread

__all__ = ["Ledger", "Moored", "marks"]


RESERVED = {"anchor", "before", "buffer", "g", "previous", "probe", "theta", *FACTORS}
"""Names of what is known of a parameter in a step; an importance's own state has others."""


@dataclass
class Moored:
    """One moored parameter and what is kept for it; of a sharded one, for the part on this rank alone.

    Attributes:
        name: its name in the model.
        parameter: the live parameter.
        anchor: its value at the end of the last task, or where this one began.
        state: the importance's tensors on this task, `current` among them.
        previous: the importance over past tasks; None before the first consolidation, which counts as 0.
        count: the iterations of this task in which it had a gradient.
        factor: the Kronecker factors of its curvature, where it has those instead of a score.
        wide: the dtype to compute in: the parameter's or that of what is kept, the wider one, at least float32.
    """

    name: str
    parameter: Tensor
    anchor: Tensor
    state: State
    previous: Tensor | None = None
    count: int = 0
    factor: Factor | None = None

    def __post_init__(self) -> None:
        """Settle the dtype to compute in."""
        self.wide = torch.promote_types(torch.promote_types(self.parameter.dtype, self.anchor.dtype), torch.float32)

    @property
    def theta(self) -> Tensor:
        """What the rules work on: the part of the parameter that is on this rank."""
        return local(self.parameter)

    def slots(self) -> State:
        """Every tensor kept for the parameter, by what it is."""
        kept = {"anchor": self.anchor, **self.state, **(self.factor.slots() if self.factor else {})}
        return kept if self.previous is None else {**kept, "previous": self.previous}

    def full(self, score: Tensor | None) -> Tensor:
        """A score in the parameter's shape: 0 where there is none, one number spread out."""
        return torch.zeros_like(self.anchor) if score is None else score.expand_as(self.anchor)


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
        exclude: tuple[str, ...],
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
        self.calibration: list[float] = []
        self.records: dict[Tensor, Moored] = {}
        self.names: dict[Tensor, str] = {}
        self._foreign: set[Tensor] = set()
        self._layered: set[Tensor] = set()
        self.refresh()

    def refresh(self) -> None:
        """Look at the model again: parameters may have appeared, or left."""
        self.names = moorable(self.model, self.exclude)
        self.records = {p: m for p, m in self.records.items() if p in self.names}
        self._foreign = {p for p in self.held() if p not in self.names}
        if self.importance.by_layer:
            layers = layers_with_factors(self.model, self.importance.largest)
            self._layered = {p for own in layers.values() for p in own.values()}
        self._every_name = moorable(self.model, ())

    def held(self) -> list[Tensor]:
        """Every parameter of the optimizer."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def trained(self) -> list[Tensor]:
        """The parameters that this optimizer trains and that are not excluded."""
        return [p for p in self.held() if p.requires_grad and self.knows(p)]

    def knows(self, p: Tensor) -> bool:
        """Whether a parameter is to be moored; one never seen before makes us look at the model again."""
        if p not in self.names and p not in self._foreign:
            self.refresh()
        return p in self.names

    def name(self, p: Tensor) -> str:
        """A parameter's name, excluded or not."""
        return self._every_name.get(p, "(a parameter outside the model)")

    def adopt(self, p: Tensor) -> Moored | None:
        """The record of a parameter, new if need be; None where it is not to be moored."""
        if p in self.records:
            return self.records[p]
        if not self.knows(p):
            return None
        if p.is_complex() or (p.grad is not None and p.grad.layout != torch.strided):
            kind = "is complex" if p.is_complex() else "has a sparse gradient"
            raise MooringError(f"{self.names[p]!r} {kind}, which cannot be moored: exclude it")
        self.records[p] = self.fresh(p, self.tasks)
        return self.records[p]

    def fresh(self, p: Tensor, task: int) -> Moored:
        """A record that starts here: anchored where the parameter is, free because nothing is known of the past."""
        dtype = self.state_dtype or torch.promote_types(p.dtype, torch.float32)
        theta = local(p).detach()
        anchor = torch.empty_like(theta, dtype=dtype).copy_(theta)
        if p in self._layered:
            none = torch.zeros((), dtype=dtype, device=p.device)
            return Moored(self.names[p], p, anchor, {"current": none}, factor=Factor.fresh(p.detach(), dtype))
        state = self._started(p, anchor, self.names[p], task)
        if "current" not in state or RESERVED & state.keys():
            raise MooringError(
                f"{self.importance.name}.start must give 'current' and none of {', '.join(sorted(RESERVED))}"
            )
        return Moored(self.names[p], p, anchor, state)

    def _started(self, p: Tensor, anchor: Tensor, name: str, task: int) -> State:
        """What the importance starts with: of a shard, the part of what the whole parameter would have."""
        state = self.importance.start(spread(anchor, p), name=name, task=task)
        return {slot: part_of(t, p) for slot, t in state.items()}

    def consolidate(self, scale: float = 1.0) -> None:
        """anchor <- parameter; previous <- merge(previous, scale * current); a new task begins."""
        self.refresh()
        for p in self.trained():
            self.adopt(p)
        factors = self.factors()
        merged = {p: self._merged(m, factors, scale) for p, m in self.records.items()}
        for p, m in self.records.items():
            m.previous = merged[p]
            m.anchor.copy_(m.theta)
            if m.factor:
                m.factor.consolidate(scale)
            else:
                m.state = self._started(p, m.anchor, m.name, self.tasks + 1)
            m.count = 0
        self.calibration += [1.0] * (self.tasks - len(self.calibration)) + [scale]
        self.tasks += 1
        self.steps = 0

    def _merged(self, m: Moored, factors: State, scale: float) -> Tensor | None:
        """The importance over past tasks with this one; as it was, where the parameter had no gradient."""
        if m.factor or (not m.count and self.importance.merges):
            return m.previous
        current = m.state["current"] * (factors.get(layer_of(m.name), 1.0) * scale)
        past = torch.zeros_like(current) if m.previous is None else m.previous
        return self.merge(past, current) if self.importance.merges else current

    def look(self, seen: Iterable[tuple[nn.Module, Factors]]) -> None:
        """Average in what layers showed in one iteration: A, G, and a bias's G."""
        for layer, (inputs, outputs, sums) in seen:
            for name, p in layer.named_parameters(recurse=False):
                if (m := self.records.get(p)) and m.factor:
                    m.factor.look(*((inputs, outputs) if name == "weight" else (None, sums)))
                    m.factor.looks += 1

    def factors(self) -> State:
        """A factor for the scores of each layer, where the importance is balanced; else nothing."""
        if not self.importance.balances or not self.records:
            return {}
        sums: dict[str, Tensor] = {}
        sizes: dict[str, int] = {}
        scores = [m.full(m.state["current"]).abs().sum() for m in self.records.values()]
        for m, score in zip(self.records.values(), over_shards(scores, list(self.records)), strict=True):
            layer = layer_of(m.name)
            sums[layer] = sums[layer] + score if layer in sums else score
            sizes[layer] = sizes.get(layer, 0) + m.parameter.numel()
        return dict(zip(sums, self.importance.factors(list(sums.values()), list(sizes.values())), strict=True))


def marks(parameters: list[Tensor]) -> list[int]:
    """What tells whether gradients were replaced or written to."""
    found: list[int] = []
    for p in parameters:
        found += id(p.grad), 0 if p.grad is None else local(p.grad)._version
    return found
