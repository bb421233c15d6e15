"""Importance and pull of all parameters on a GPU in one pass over memory: the same rules, as one kernel."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mooring.backends.kernels.codegen import DTYPES, has_compiler
from mooring.backends.kernels.multi_tensor import Layout, MultiTensorKernel, block_of
from mooring.importance import Importance, Iteration, State
from mooring.pulls import GradientPull, ParameterPull
from mooring.pulls.run_axis import Number
from mooring.state.quantization import BLOCKS, past

__all__ = ["Fused", "KernelArgs", "advancing", "fits", "likeness", "loading"]

MOVING = ("theta", "g", "before", "probe", "load")
"""Tensors that may lie elsewhere in each step."""


@dataclass
class KernelArgs:
    """What a kernel is told about one parameter.

    Attributes:
        tensors: by name: theta, g, anchor, and those there are of previous, before, probe, load and state_...
        numbers: by name: lr, and what else the rule reads.
        wide: the dtype to compute in.
        kind: whatever else makes its rule another one.
        moves: whether the anchor may lie elsewhere in each step as well.
    """

    tensors: dict[str, Tensor]
    numbers: dict[str, Number]
    wide: torch.dtype
    kind: Hashable = None
    moves: bool = False


@dataclass
class _Part:
    """Parameters that are alike, and the kernel for them.

    Attributes:
        places: which ones.
        layout: where their tensors lie.
        table: the kernel.
        moves: whether anchors may lie elsewhere in each step.
    """

    places: list[int]
    layout: Layout
    table: MultiTensorKernel
    moves: bool

    def names(self) -> list[str]:
        """What may lie elsewhere in each step."""
        return [name for name in self.layout.rows if name in MOVING or (name == "anchor" and self.moves)]

    def like(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Each in its parameter's order of memory."""
        return [
            mine if mine.stride() == stride else torch.empty_strided(mine.shape, stride, **_kind(mine)).copy_(mine)
            for mine, (_, stride) in zip(tensors, self.layout.forms["theta"], strict=True)
        ]


class Fused:
    """Runs a rule over the parameters that are on a GPU, and says which are left for others to do.

    What could be done is found once for each set of parameters, and remembered until `forget`.

    Args:
        rule: makes the rule from what a parameter's `kind` says: a function of tensors and numbers by name, which
            changes some of the tensors in place.
    """

    def __init__(self, rule: Callable[[Any], Callable[[dict[str, Tensor]], None]]) -> None:
        self.rule = rule
        self.tables: dict[Hashable, MultiTensorKernel | None] = {}
        self.plans: dict[Hashable, tuple[list[_Part], list[int], Sequence[object]]] = {}

    def forget(self) -> None:
        """Something that is kept lies elsewhere: plans are made anew."""
        self.plans = {}

    def run(
        self,
        owners: Sequence[object],
        kinds: Sequence[Hashable],
        told: Callable[[int], KernelArgs],
        now: Callable[[str, Sequence[int]], Sequence[Any]],
    ) -> list[int]:
        """Apply the rule. What a plan knows already is not asked again: a model may have thousands of parameters.

        Args:
            owners: who keeps each parameter's tensors.
            kinds: of each parameter, as in `KernelArgs`.
            told: what there is to know of the parameter at a place; asked when a plan is made.
            now: a tensor or a number of the parameters at some places by its name; asked in every step.

        Returns:
            The places of those that it could not be applied to.
        """
        of = tuple(map(id, owners)), tuple(kinds)
        if of not in self.plans:
            plan = self._plan([told(place) for place in range(len(owners))])
            self.plans[of] = *plan, owners  # kept, so that nobody else gets their ids
        parts, left, _ = self.plans[of]
        moving = [{name: now(name, part.places) for name in part.names()} for part in parts]
        if not all(part.layout.is_for("theta", named["theta"]) for part, named in zip(parts, moving, strict=True)):
            del self.plans[of]
            return self.run(owners, kinds, told, now)
        for part, named in zip(parts, moving, strict=True):
            # the others are made like their parameters; all are held on to until the kernel has its place in the queue
            named |= {name: part.like(named[name]) for name in ("g", "probe", "anchor") if name in named}
            for name, tensors in named.items():
                part.layout.move(name, tensors)
            part.table(part.layout, {name: now(name, part.places) for name in part.table.numbers})
        return left

    def _plan(self, told: Sequence[KernelArgs]) -> tuple[list[_Part], list[int]]:
        alike: dict[Hashable, list[int]] = {}
        left = []
        for place, each in enumerate(told):
            if fits(each.tensors) and all(isinstance(number, int | float) for number in each.numbers.values()):
                same = likeness(each.tensors), tuple(each.numbers), each.wide, each.kind
                alike.setdefault(same, []).append(place)
            else:
                left.append(place)
        parts = []
        for kind, places in alike.items():
            table = self._table(kind, told[places[0]])
            if table is None:
                left += places
            else:
                layout = Layout([told[place].tensors for place in places])
                parts.append(_Part(places, layout, table, told[places[0]].moves))
        return parts, sorted(left)

    def _table(self, kind: Hashable, like: KernelArgs) -> MultiTensorKernel | None:
        if kind not in self.tables:
            try:
                self.tables[kind] = MultiTensorKernel(self.rule(like.kind), like.tensors, list(like.numbers), like.wide)
            except NotImplementedError:  # a rule of somebody's own, with something that is not elementwise
                self.tables[kind] = None
        return self.tables[kind]


def fits(tensors: Mapping[str, Tensor]) -> bool:
    """Whether a kernel can find everything: on one GPU, each in the order of memory that the parameter has."""
    theta = tensors["theta"]
    if type(theta) not in (nn.Parameter, Tensor) or not has_compiler(theta.device):
        return False
    dense = theta.is_contiguous() or (theta.ndim == 4 and theta.is_contiguous(memory_format=torch.channels_last))
    kept = [t for name, t in tensors.items() if name not in (*MOVING, *BLOCKS)]
    return (
        dense
        and all(t.ndim == 0 or t.stride() == theta.stride() for t in kept)
        and all(t.device == theta.device and t.dtype in DTYPES for t in tensors.values())
    )


def likeness(tensors: Mapping[str, Tensor]) -> Hashable:
    """What parameters must have in common for one kernel to do them together."""
    return tensors["theta"].device, *((n, t.dtype, t.ndim == 0, block_of(tensors, n)) for n, t in tensors.items())


def _kind(tensor: Tensor) -> dict[str, Any]:
    return {"dtype": tensor.dtype, "device": tensor.device}


def advancing(importance: Importance, pull: ParameterPull | None) -> Callable[[Any], Callable[[State], None]]:
    """Rules that update the importance where the parameter's kind says so, then pull where it says so."""

    def of(kind: tuple[bool, bool]) -> Callable[[State], None]:
        counts, pulls = kind

        def rule(told: State) -> None:
            state = {name.removeprefix("state_"): t for name, t in told.items() if name.startswith("state_")}
            if counts:
                seen: dict[str, Any] = {name: told[name] for name in Iteration.TENSORS if name in told}
                importance.update(state, Iteration(**seen, samples=told["samples"], count=told["count"]))  # type: ignore[arg-type]
            if pulls and pull is not None and "previous" in told:
                previous = past(told)
                rate = pull.rate(previous, state.get("current", previous), told["lr"])
                told["theta"].lerp_(told["anchor"], rate)

        return rule

    return of


def loading(pull: GradientPull) -> Callable[[Any], Callable[[State], None]]:
    """The rule of a penalty: load <- (g + force) * factor."""

    def rule(told: State) -> None:
        force = pull.force(past(told), told["theta"] - told["anchor"], told["lr"])
        told["load"].copy_((told["g"] + force) * told["factor"])

    return lambda kind: rule
