"""Penalty, optimizer, importance and pull of a method as one kernel per parameter, for a GPU."""

from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from mooring.backends.eager import apply_penalty, apply_pull, pull_is_due, update_importance
from mooring.backends.kernels.launch import dry_run
from mooring.rules import Budget, GradientPull, ParameterPull, Pull
from mooring_lab.fleet.fleet_optimizer import FleetOptimizer
from mooring_lab.fleet.gpu.run_kernel import RunKernel
from mooring_lab.fleet.method_state import MethodState, Tensors, rows_of
from mooring_lab.fleet.stack.stack import flatten_per_run, to_stack_layout


class FusedStep:
    """Everything between two gradients for the parameters of some runs, in one pass over memory.

    The order is that of `MethodGroups.take_step`, and the rules are the same; `RunKernel` joins them into a kernel. The
    host never waits for the device. What it counts is counted apart, in `count_step`, so that a step can be recorded
    and replayed.

    Args:
        method_state: of the runs; None if nothing is moored.
        optimizer: of the whole fleet.
    """

    def __init__(self, method_state: MethodState | None, optimizer: FleetOptimizer) -> None:
        self.method_state, self.optimizer = method_state, optimizer
        self.kernels: dict[tuple[object, ...], RunKernel] = {}
        self.counts: Tensors = {}

    @torch.no_grad()
    def run(
        self,
        rows: slice,
        parameters: Tensors,
        gradients: Tensors,
        probes: Tensors,
        added: Tensors,
        samples: int,
        first_bad: Tensor,
        now: Tensor,
        *,
        compile_only: bool = False,
    ) -> None:
        """Move every parameter that has a gradient, update its importance, and pull it.

        Args:
            rows: the runs, as rows of the whole stack.
            parameters: of the whole stack; changed in place.
            gradients: of the task's loss, of the whole stack.
            probes: the gradients of the importance's own function of the outputs.
            added: what the optimizer gets beside the task's gradients.
            samples: in the batch.
            first_bad: of the whole stack; lowered to the present step where a gradient is not finite.
            now: the step, int64 of shape (1,).
            compile_only: only compile the kernels, inside `dry_run`.
        """
        self._prepare(rows, parameters, gradients, probes)
        if self.counts and not compile_only:
            torch._foreach_add_(list(self.counts.values()), 1)
        state = self.method_state
        forces = {} if state is None else state.layer_forces(gradients)
        corrections = self.optimizer.count_step(gradients.keys(), rows, dry=compile_only)
        for name, g in gradients.items():
            kept = self.optimizer.elements(name)
            stacked = {"theta": parameters[name].detach(), "g": to_stack_layout(g), **kept}
            stacked |= {"added": to_stack_layout(added[name])} if name in added else {}
            tensors = {key: flatten_per_run(tensor)[rows] for key, tensor in stacked.items()}
            tensors |= self.optimizer.per_run_numbers(rows) | corrections.get(name, {})
            if state is not None and name in state.states:
                tensors |= self._state_tensors(state, name, probes, rows)
            if name in forces:
                force = flatten_per_run(to_stack_layout(forces[name]))
                tensors["added"] = tensors["added"] + force if "added" in tensors else force
            if "count" in tensors:
                tensors["samples"] = self.optimizer.size(samples)
            self._kernel(tensors)(tensors, first_bad[rows], now)
        if state is not None and self.pulls and not self.pulls_in_kernel and not compile_only:
            state.apply_pull(list(gradients))  # depends on all parameters of a layer or a run

    def _prepare(self, rows: slice, parameters: Tensors, gradients: Tensors, probes: Tensors) -> None:
        """Allocate missing state and copy the host's counters to the device."""
        for name in gradients:
            self.optimizer.allocate(name, parameters[name])
        if (state := self.method_state) is None:
            return
        state.bind(rows_of(parameters, rows), gradients)
        watched = probes if state.importance.watches == "outputs" else gradients
        counted = [n for n in gradients if n in watched and n in state.states and not state.states[n].factors]
        if set(counted) != set(self.counts):
            taken = [state.states[name].count for name in counted]
            counts = self.optimizer.lr.new_tensor(taken)  # one copy to the device
            self.counts = dict(zip(counted, counts.unbind(), strict=True))

    def count_step(self) -> None:
        """Count a step that was taken."""
        if self.method_state is not None:
            self.method_state.steps += 1
            for name in self.counts:
                self.method_state.states[name].count += 1

    @property
    def kernel_key(self) -> Hashable:
        """What distinguishes its kernels from those of another group."""
        state = self.method_state
        kind = None if state is None else (state.method.name, state.tasks > 0, self.pulls)
        return kind, self.optimizer.constants

    @property
    def pulls(self) -> bool:
        """Whether the next step pulls."""
        state = self.method_state
        return state is not None and not state.scores_late and pull_is_due(state.pull, state.tasks, state.steps + 1)

    @property
    def pulls_in_kernel(self) -> bool:
        """Whether the pull of a parameter does not depend on other parameters."""
        state = self.method_state
        return state is not None and not state.importance.balances and isinstance(state.pull, ParameterPull)

    def _state_tensors(self, state: MethodState, name: str, probes: Tensors, rows: slice) -> Tensors:
        """Return the tensors that a moored parameter adds."""
        parameter = state.states[name]
        kept = {"anchor": parameter.anchor, **parameter.previous_tensors()}
        kept |= {f"state_{slot}": tensor for slot, tensor in parameter.importance_state.items()}
        tensors = {key: flatten_per_run(tensor) for key, tensor in kept.items()} | per_run_options(state.pull)
        if name in self.counts:
            tensors["count"] = self.counts[name]
        if name in probes:
            tensors["probe"] = flatten_per_run(to_stack_layout(probes[name]))[rows]
        return tensors

    def _kernel(self, tensors: Tensors) -> RunKernel:
        kind = (*((key, tensor.shape[1:2] == (1,)) for key, tensor in tensors.items()), self.pulls)
        if kind not in self.kernels:
            checked, pulls = [key for key in ("g", "probe", "added") if key in tensors], self.pulls
            method = None if self.method_state is None else self.method_state.method
            key = (method, pulls, self.optimizer.constants)  # with its tensors' kinds, all that `_rule` depends on
            self.kernels[kind] = RunKernel(lambda tensors: self._rule(tensors, pulls), tensors, checked, key)
        return self.kernels[kind]

    def _rule(self, tensors: dict[str, Any], pulls: bool) -> None:
        """Take one step of one parameter of some runs: Algorithm 1 on tensors of shape (runs, elements)."""
        pull, g = self._pull(tensors), tensors["g"]
        if isinstance(pull, GradientPull) and "previous" in tensors:
            g = apply_penalty(pull, tensors)
        if "added" in tensors:
            g = g + tensors["added"]
        before = tensors["theta"].clone()
        self.optimizer.update(tensors, g)
        state = self.method_state
        if state is None or state.scores_late or "anchor" not in tensors:
            return
        if "count" in tensors:
            scored = g if state.method.penalized_scores else tensors["g"]
            update_importance(state.importance, {**tensors, "g": scored, "before": before})
        if pulls and self.pulls_in_kernel and isinstance(pull, ParameterPull):
            apply_pull(pull, tensors)

    def _pull(self, tensors: Tensors) -> Pull | None:
        """Return the pull, with the options per run that are among the rule's tensors."""
        if self.method_state is None:
            return None
        pull = copy(self.method_state.pull)
        for name in per_run_options(self.method_state.pull):
            if name in tensors:
                object.__setattr__(pull, name, tensors[name])  # a new frozen one would check its numbers
        return pull


def per_run_options(pull: Pull) -> Tensors:
    """Return the options of a pull that have one number for each run; a budget's are not read in the kernel.

    Example:
        >>> from mooring.rules import Penalty
        >>> per_run_options(Penalty(torch.tensor([1.0, 10.0])))
        {'strength': tensor([ 1., 10.])}
    """
    if isinstance(pull, Budget):
        return {}
    options = {field.name: getattr(pull, field.name) for field in fields(pull)}  # type: ignore[arg-type]
    return {name: value for name, value in options.items() if isinstance(value, Tensor)}


_compiled: set[Hashable] = set()
"""Groups whose kernels were compiled before, by all that the kernels depend on."""


def run_fused_steps(
    pairs: Sequence[tuple[FusedStep, slice]], parameters: Tensors, gradients: Tensors, *args: Any, new: bool
) -> None:
    """Run the step of each group of rows; compile `new` kernels in parallel before.

    Args:
        pairs: the steps, each with its rows.
        parameters: of the whole stack.
        gradients: of the task's loss.
        args: the other arguments of `FusedStep.run`.
        new: whether there may be kernels that are not compiled yet.
    """
    if new:
        shapes = frozenset((g.shape[1:], g.dtype) for g in gradients.values())
        keys = {(step.kernel_key, shapes): (step, rows) for step, rows in pairs}
        to_compile = {key: pair for key, pair in keys.items() if key not in _compiled}
        with dry_run() if to_compile else nullcontext():
            for step, rows in to_compile.values():
                step.run(rows, parameters, gradients, *args, compile_only=True)
        _compiled.update(to_compile)
    for step, rows in pairs:
        step.run(rows, parameters, gradients, *args)
