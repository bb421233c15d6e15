"""What is kept for each moored parameter, and since when."""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mooring.distributed.dtensor import local_part, local_tensor, reduce_over_shards, to_dtensor
from mooring.errors import MooringError
from mooring.importance import Importance, State
from mooring.importance.kronecker_factors import FACTORS, Factor, Factors, layers_with_factors
from mooring.pulls.merges import Merge
from mooring.state.memory import Memory, compute_dtype_of
from mooring.state.offload import AnchorOffload
from mooring.state.quantization import QuantizedImportance
from mooring.state.selection import layer_of, moorable

__all__ = ["PAST", "MooringState", "ParameterState", "called", "marks"]

PAST = {"previous", "previous_high", "previous_step"}
"""Under which names the past is saved."""

RESERVED = {"anchor", "before", "buffer", "g", "probe", "theta", *PAST, *FACTORS}
"""Names of what is known of a parameter in a step; an importance's own state has others."""


@dataclass
class ParameterState:
    """One moored parameter and what is kept for it; of a sharded one, for the part on this rank alone.

    Attributes:
        name: its name in the model.
        parameter: the live parameter.
        anchor: its value at the end of the last task, or where this one began; perhaps in the host's memory.
        state: the importance's tensors on this task, `current` among them; none where nothing is kept of it.
        previous: the importance over past tasks; None before the first consolidation, which counts as 0.
        count: the iterations of this task in which it had a gradient.
        factor: the Kronecker factors of its curvature, where it has those instead of a score.
        staged: the anchor on the parameter's device, while it is there.
        wide: the dtype to compute in: the parameter's or that of what is kept, the wider one, at least float32.
    """

    name: str
    parameter: Tensor
    anchor: Tensor
    state: State
    previous: Tensor | QuantizedImportance | None = None
    count: int = 0
    factor: Factor | None = None
    staged: Tensor | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        """Settle the dtype to compute in."""
        self.wide = torch.promote_types(torch.promote_types(self.parameter.dtype, self.anchor.dtype), torch.float32)

    @property
    def theta(self) -> Tensor:
        """What the rules work on: the part of the parameter that is on this rank."""
        return local_tensor(self.parameter)

    @property
    def near(self) -> Tensor:
        """The anchor on the parameter's device."""
        return self.anchor.to(self.theta.device, non_blocking=True) if self.staged is None else self.staged

    def past(self) -> State:
        """What is known of past tasks, as it is kept."""
        if isinstance(self.previous, QuantizedImportance):
            return self.previous.slots()
        return {} if self.previous is None else {"previous": self.previous}

    def held(self) -> State:
        """What a pull reads, but for the importance on this task."""
        return {"theta": self.theta, "anchor": self.near, **self.past()}

    def slots(self) -> State:
        """Every tensor kept for the parameter, by what it is."""
        return {"anchor": self.anchor, **self.state, **(self.factor.slots() if self.factor else {}), **self.past()}

    def full(self, score: Tensor | QuantizedImportance | None) -> Tensor:
        """A score in the parameter's shape: 0 where there is none, one number spread out."""
        if score is None:
            return torch.zeros_like(self.theta, dtype=self.wide)
        return (score.values() if isinstance(score, QuantizedImportance) else score).expand_as(self.theta)


class MooringState:
    """The records of a model's moored parameters, made when a parameter gets its first gradient.

    Args:
        model: whose parameters they are.
        optimizer: which of them it trains.
        importance: what is kept of a task.
        merge: how a finished task joins the past.
        exclude: what is left free, checked.
        memory: in what form things are kept, and where.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        importance: Importance,
        merge: Merge,
        exclude: tuple[str, ...],
        memory: Memory,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.importance = importance
        self.merge = merge
        self.exclude = exclude
        self.memory = memory
        self.staging = AnchorOffload(memory.staging)
        self.tasks = 0
        self.steps = 0
        self.unseen: set[str] = set()  # parameters that did not train when importance was estimated
        self.calibration: list[float] = []
        self.records: dict[Tensor, ParameterState] = {}
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

    def adopt(self, p: Tensor) -> ParameterState | None:
        """The record of a parameter, new if need be; None where it is not to be moored."""
        if (known := self.records.get(p)) is not None:
            return known
        if not self.knows(p):
            return None
        if p.is_complex() or (p.grad is not None and p.grad.layout != torch.strided):
            kind = "is complex" if p.is_complex() else "has a sparse gradient"
            raise MooringError(f"{self.names[p]!r} {kind}, which cannot be moored: exclude it")
        if self.names[p] in self.unseen:
            self._warn_of_late()
        self.records[p] = self.fresh(p, self.tasks)
        return self.records[p]

    def fresh(self, p: Tensor, task: int) -> ParameterState:
        """A record that starts here: anchored where the parameter is, free because nothing is known of the past."""
        anchor = self.memory.anchored(local_tensor(p).detach())
        if p in self._layered:
            dtype = compute_dtype_of(p)
            none = {"current": torch.zeros((), dtype=dtype, device=p.device)}
            return ParameterState(self.names[p], p, anchor, none, factor=Factor.fresh(p.detach(), dtype))
        return ParameterState(self.names[p], p, anchor, self.started(p, task) if self.memory.accumulates else {})

    def started(self, p: Tensor, task: int) -> State:
        """What the importance starts with: of a shard, the part of what the whole parameter would have."""
        theta, kept = local_tensor(p).detach(), self.memory.current
        dtype = (
            torch.promote_types(compute_dtype_of(theta), kept)
            if isinstance(kept, torch.dtype)
            else compute_dtype_of(theta)
        )
        like = theta if theta.dtype == dtype else torch.empty_like(theta, dtype=dtype)
        state = self.importance.start(to_dtensor(like, p), name=self.names[p], task=task)
        if "current" not in state or RESERVED & state.keys():
            raise MooringError(
                f"{self.importance.name}.start must give 'current' and none of {', '.join(sorted(RESERVED))}"
            )
        state = {slot: local_part(t, p) for slot, t in state.items()}
        return {**state, "current": self.memory.started(state["current"])}

    def _warn_of_late(self) -> None:
        """Say once which parameters train now and did not when importance was estimated."""
        late = [self.names[p] for p in self.trained() if self.names[p] in self.unseen]
        self.unseen -= {*late}
        warnings.warn(
            f"{_some(late)} did not train when importance was estimated, so that nothing holds what the model knew "
            "there: unfreeze parameters, and give them to the optimizer, before the reference or data",
            stacklevel=2,
        )

    @property
    def idle(self) -> bool:
        """Whether the last task was consolidated and nothing was seen since: no step, and no estimate."""
        return self.tasks > 0 and not self.steps and not any(m.count for m in self.records.values())

    def drop_anchor(self) -> None:
        """anchor <- parameter, of a task in which nothing was seen: it is none. What moved all the same is told."""
        moved = [m.name for m in self.records.values() if bool((m.theta != m.near).any())]
        if moved:
            warnings.warn(
                f"{_some(moved)} moved since the last task and this Mooring saw no step: nothing was held, and no task "
                "is counted. A new optimizer has to be told, moor.rebind(optimizer)",
                stacklevel=5,
            )
        self.staging.forget()
        for m in self.records.values():
            m.anchor.copy_(m.theta)

    def consolidate(self, scale: float = 1.0) -> None:
        """anchor <- parameter; previous <- merge(previous, scale * current); a new task begins."""
        if self.idle:
            self.drop_anchor()
            return
        self.refresh()
        for p in self.trained():
            self.adopt(p)
        self._check_known()
        factors = self.factors()
        merged = {p: self._merged(m, factors, scale) for p, m in self.records.items()}
        self.staging.forget()
        for p, m in self.records.items():
            m.previous = merged[p]
            m.anchor.copy_(m.theta)
            if m.factor:
                m.factor.consolidate(scale)
            else:
                m.state = self.started(p, self.tasks + 1) if self.memory.accumulates else {}
            m.count = 0
        self.calibration += [1.0] * (self.tasks - len(self.calibration)) + [scale]
        self.tasks += 1
        self.steps = 0

    def _check_known(self) -> None:
        """Refuse to end a task of which nothing was kept."""
        lacking = [m for m in self.records.values() if m.count and not m.factor and not m.state]
        layered = [m for m in self.records.values() if m.factor and m.count and not m.factor.looks]
        if self.importance.merges and not self.memory.accumulates and (lacking or layered):
            raise MooringError(
                'nothing is known of this task, for current="none" keeps nothing while training: give '
                "consolidate(data=...) some of its data, or attach without"
            )

    def _merged(self, m: ParameterState, factors: State, scale: float) -> Tensor | QuantizedImportance | None:
        """The importance over past tasks with this one; as it was, where the parameter had no gradient."""
        if m.factor or (not m.count and self.importance.merges):
            return m.previous
        state = m.state or self.started(m.parameter, self.tasks)
        current = state["current"].to(m.wide) * (factors.get(layer_of(m.name), 1.0) * scale)
        past = m.previous.values() if isinstance(m.previous, QuantizedImportance) else m.previous
        past = torch.zeros_like(current) if past is None else past.to(m.wide)
        return self.memory.kept(self.merge(past, current) if self.importance.merges else current, m.theta)

    def astray(self) -> bool:
        """Whether the model went to another device, and what is kept is still where it was."""
        kept = ((m, slot, t) for m in self.records.values() for slot, t in m.slots().items())
        return any(t.device != m.theta.device for m, slot, t in kept if slot != "anchor" or not self.memory.host)

    def told(self) -> dict[str, Any]:
        """What a saved state says of all parameters together, as plain values."""
        return {
            "importance": self.importance.name,
            "options": called(self.importance),
            "merge": getattr(self.merge, "__name__", ""),
            "tasks": self.tasks,
            "steps": self.steps,
            "moored": sorted(self.names.values()),
            "factors": {m.name: [m.factor.looks, m.factor.tasks] for m in self.records.values() if m.factor},
            **({} if self.memory.accumulates else {"accumulates": False}),
        }

    def look(self, seen: Iterable[tuple[nn.Module, Factors]]) -> None:
        """Average in what layers showed in one iteration: A, G, and a bias's G."""
        for layer, (inputs, outputs, sums) in seen:
            for name, p in layer.named_parameters(recurse=False):
                if (m := self.records.get(p)) and m.factor:
                    m.factor.look(*((inputs, outputs) if name == "weight" else (None, sums)))
                    m.factor.looks += 1

    def factors(self) -> State:
        """A factor for the scores of each layer, where the importance is balanced; else nothing."""
        known = [m for m in self.records.values() if m.state]
        if not self.importance.balances or not known:
            return {}
        sums: dict[str, Tensor] = {}
        sizes: dict[str, int] = {}
        scores = [m.full(m.state["current"]).abs().sum(dtype=m.wide) for m in known]
        for m, score in zip(known, reduce_over_shards(scores, [m.parameter for m in known]), strict=True):
            layer = layer_of(m.name)
            sums[layer] = sums[layer] + score if layer in sums else score
            sizes[layer] = sizes.get(layer, 0) + m.parameter.numel()
        return dict(zip(sums, self.importance.factors(list(sums.values()), list(sizes.values())), strict=True))


def called(thing: object) -> str:
    """A pull or an importance with its options, where it says them; else the name of its class.

    Example:
        >>> from mooring.pulls import Proximal
        >>> called(Proximal(3.0))
        'Proximal(strength=3.0)'
    """
    name = type(thing).__name__
    return repr(thing) if repr(thing).startswith(f"{name}(") else name


def _some(names: list[str]) -> str:
    """The first of them, and how many more.

    Example:
        >>> _some(["0.weight", "0.bias", "2.weight"])
        "'0.weight' and 2 others"
    """
    others = f" and {len(names) - 1} {'other' if len(names) == 2 else 'others'}" if names[1:] else ""
    return f"{names[0]!r}{others}"


def marks(parameters: list[Tensor]) -> list[int]:
    """What tells whether gradients were replaced or written to."""
    found: list[int] = []
    for p in parameters:
        g = p.grad
        found += id(g), 0 if g is None else local_tensor(g)._version
    return found
