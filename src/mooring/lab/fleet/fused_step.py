"""Optimizer, importance and pull of a method as one kernel per parameter, for a GPU."""

from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from mooring.backends.kernels.launch import dry_run
from mooring.importance import Iteration
from mooring.lab.fleet.gpu.convolution import has_kernels
from mooring.lab.fleet.gpu.run_kernel import Elementwise
from mooring.lab.fleet.method_groups import Groups, rows_of
from mooring.lab.fleet.method_state import Held, Moorings, Tensors
from mooring.lab.fleet.sgd import SGD
from mooring.lab.fleet.stack.stack import flatten_per_run, to_stack_layout
from mooring.pulls import Budget, GradientPull, ParameterPull, Pull
from mooring.pulls.pull import acts
from mooring.pulls.run_axis import per_run

__all__ = ["Fused", "advance_all", "fused_for"]


class Fused:
    """What happens to the parameters of some runs between two gradients, in one pass over memory.

    The order is that of `Moorings` and the rules are the core's own; `Elementwise` joins them. Nothing here waits for
    the device, and what the host counts is counted apart, in `tick`, so that a step can be recorded and played back.

    Args:
        moorings: of the runs; None where nothing is moored.
        sgd: of the whole fleet.
    """

    def __init__(self, moorings: Moorings | None, sgd: SGD) -> None:
        self.moorings, self.sgd = moorings, sgd
        self.rules: dict[tuple[object, ...], Elementwise] = {}
        self.counts: dict[str, Tensor] = {}
        self.due: list[str] = []

    @torch.no_grad()
    def advance(
        self,
        rows: slice,
        parameters: Tensors,
        gradients: Tensors,
        probes: Tensors,
        samples: int,
        bad: Tensor,
        now: Tensor,
        *,
        in_dry_run: bool = False,
    ) -> None:
        """Move every parameter that has a gradient, update its importance, pull it back.

        Args:
            rows: the runs, as rows of the whole stack.
            parameters: of the whole stack; changed in place.
            gradients: of the task's loss, of the whole stack.
            probes: the gradients of the importance's own function of the outputs.
            samples: in the batch.
            bad: of the whole stack; the step is written where a gradient is not finite.
            now: the step, int64 of shape (1,).
            in_dry_run: only have the kernels compiled, within `dry_run`.
        """
        self._prepare(rows, parameters, gradients, probes)
        if self.counts and not in_dry_run:
            torch._foreach_add_(list(self.counts.values()), 1)
        moorings = self.moorings
        for name, g in gradients.items():
            whole = {"theta": parameters[name].detach(), "g": to_stack_layout(g), "velocity": self.sgd.velocity[name]}
            tensors = {what: flatten_per_run(tensor)[rows] for what, tensor in whole.items()} | self.sgd.of_each(rows)
            held = None if moorings is None else moorings.held.get(name)
            if moorings is not None and held is not None:
                tensors |= self._moored(moorings, name, held, probes, rows)
            if "count" in tensors:
                tensors["samples"] = self.sgd.size(samples)
            self._rule(tensors)(tensors, bad[rows], now)
        if moorings is not None and self.pulling and not self.alone and not in_dry_run:
            moorings.pull_back(rows_of(parameters, rows), self.due)  # scores, or parameters, against each other

    def _prepare(self, rows: slice, parameters: Tensors, gradients: Tensors, probes: Tensors) -> None:
        """Whatever is kept for a parameter is there, and what is counted on the device stands where the host has it."""
        moorings = self.moorings
        self.due = list(gradients)
        for name in gradients:
            if name not in self.sgd.velocity:
                self.sgd.velocity[name] = torch.zeros_like(parameters[name])
        if moorings is None:
            return
        moorings.adopt(rows_of(parameters, rows), gradients)
        outputs = moorings.importance.watches == "outputs"
        known = [name for name in self.due if name in moorings.held and not moorings.held[name].factor]
        mine = [name for name in known if name in probes or not outputs]
        if set(mine) != set(self.counts):
            counts = self.sgd.lr.new_tensor([moorings.held[name].count for name in mine])  # one way to the device
            self.counts = dict(zip(mine, counts.unbind(), strict=True))

    def tick(self) -> None:
        """Count a step that was taken."""
        if self.moorings is not None:
            self.moorings.steps += 1
            for name in self.counts:
                self.moorings.held[name].count += 1

    def forget(self) -> None:
        """What is counted on the device begins from the host's counts again: a new task, or other runs."""
        self.counts = {}

    @property
    def kind(self) -> Hashable:
        """What tells its kernels from those of another group."""
        moorings = self.moorings
        numbers = (each if isinstance(each, float) else None for each in (self.sgd.momentum, self.sgd.weight_decay))
        own = None if moorings is None else (moorings.method.name, moorings.tasks > 0, self.pulling)
        return (own, *numbers)

    @property
    def pulling(self) -> bool:
        """Whether the next step pulls."""
        moorings = self.moorings
        if moorings is None or not moorings.tasks or isinstance(moorings.pull, GradientPull):
            return False
        return acts(moorings.pull.every, moorings.steps + 1)

    @property
    def alone(self) -> bool:
        """Whether a parameter is pulled without a look at the others."""
        moorings = self.moorings
        return moorings is not None and not moorings.importance.balances and isinstance(moorings.pull, ParameterPull)

    def _moored(self, moorings: Moorings, name: str, held: Held, probes: Tensors, rows: slice) -> Tensors:
        """The tensors that a mooring brings in."""
        found = {"anchor": flatten_per_run(held.anchor)}
        if held.previous is not None:
            found["previous"] = flatten_per_run(held.previous)
        found |= dials(moorings.pull)
        if name in self.counts:
            found["count"] = self.counts[name]
        if name in probes:
            found["probe"] = flatten_per_run(to_stack_layout(probes[name]))[rows]
        return found | {f"state_{slot}": flatten_per_run(tensor) for slot, tensor in held.state.items()}

    def _rule(self, tensors: Tensors) -> Elementwise:
        kind = (*((what, tensor.shape[1:2] == (1,)) for what, tensor in tensors.items()), self.pulling)
        if kind not in self.rules:
            checked = [what for what in ("g", "probe") if what in tensors]
            pulling = self.pulling
            method = None if self.moorings is None else self.moorings.method
            numbers = (each for each in (self.sgd.momentum, self.sgd.weight_decay) if not isinstance(each, Tensor))
            key = (method, pulling, *numbers)  # with its tensors, all that `_move` does hangs on
            self.rules[kind] = Elementwise(lambda told: self._move(told, pulling), tensors, checked, key)
        return self.rules[kind]

    def _move(self, told: Tensors, pulling: bool) -> None:
        """One parameter of some runs, each tensor of shape (runs, elements)."""
        theta, g, velocity, lr = (told[what] for what in ("theta", "g", "velocity", "lr"))
        anchor, previous = told.get("anchor"), told.get("previous")
        load, pull = g, self._pull(told)
        if isinstance(pull, GradientPull) and anchor is not None and previous is not None:
            load = g + pull.force(previous, theta - anchor, lr)
        if self.sgd.decays:
            load = load + per_run(told.get("weight_decay", self.sgd.weight_decay), theta) * theta
        velocity.mul_(per_run(told.get("momentum", self.sgd.momentum), velocity)).add_(load)
        before = theta.clone()
        theta.sub_(per_run(lr, velocity) * velocity)
        if self.moorings is None or anchor is None:
            return
        state = {what.removeprefix("state_"): tensor for what, tensor in told.items() if what.startswith("state_")}
        if "count" in told:
            counts = told["samples"], told["count"]
            seen: Any = Iteration(g, theta, anchor, before, told.get("probe"), *counts)  # type: ignore[arg-type]
            self.moorings.importance.update(state, seen)
        if pulling and self.alone and isinstance(pull, ParameterPull) and previous is not None:
            theta.lerp_(anchor, pull.rate(previous, state["current"], lr))

    def _pull(self, told: Tensors) -> Pull | None:
        """The pull, with the numbers per run that are among the rule's tensors."""
        if self.moorings is None or not (mine := [name for name in dials(self.moorings.pull) if name in told]):
            return None if self.moorings is None else self.moorings.pull
        pull = copy(self.moorings.pull)
        for name in mine:
            object.__setattr__(pull, name, told[name])  # a frozen one checks its numbers when it is made
        return pull


def dials(pull: Pull) -> Tensors:
    """What a pull has of each run, by name; a budget's is looked at elsewhere.

    Example:
        >>> from mooring.pulls import Penalty
        >>> dials(Penalty(torch.tensor([1.0, 10.0])))
        {'strength': tensor([ 1., 10.])}
    """
    if isinstance(pull, Budget):
        return {}
    told = {field.name: getattr(pull, field.name) for field in fields(pull)}  # type: ignore[arg-type]
    return {name: value for name, value in told.items() if isinstance(value, Tensor)}


def fused_for(groups: Groups, sgd: SGD) -> list[Fused]:
    """A kernel for each group; none at all where there is no compiler for them."""
    return [Fused(moorings, sgd) for _, moorings in groups.every] if has_kernels(sgd.lr.device) else []


_rehearsed: set[Hashable] = set()
"""Groups whose kernels were compiled before, by all that these hang on."""


def advance_all(
    fused: Sequence[Fused], groups: Groups, parameters: Tensors, gradients: Tensors, *told: Any, rehearse: bool
) -> None:
    """Advance each group, told what `Fused.advance` is told; first have all their kernels compiled, where asked to."""
    pairs = [(each, rows) for each, (rows, _) in zip(fused, groups.every, strict=True)]
    told = (parameters, gradients, *told)
    if rehearse:
        sizes = frozenset((g.shape[1:], g.dtype) for g in gradients.values())
        new = {(each.kind, sizes): (each, rows) for each, rows in pairs if (each.kind, sizes) not in _rehearsed}
        with dry_run() if new else nullcontext():
            for each, rows in new.values():
                each.advance(rows, *told, in_dry_run=True)
        _rehearsed.update(new)
    for each, rows in pairs:
        each.advance(rows, *told)
