"""One training step of a moored model, from top to bottom: Algorithm 1 of the paper in an optimizer's hooks."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from mooring.backends.budget_solver import BudgetSolver
from mooring.backends.chunks import tiled
from mooring.backends.fused import Fused, KernelArgs, advancing, loading
from mooring.backends.gc_control import gc_disabled
from mooring.backends.kernels.codegen import has_compiler
from mooring.backends.parameter_step import ParameterStep, now_of, pull_back
from mooring.backends.penalized_gradients import loaded
from mooring.diagnose.finite import check_finite
from mooring.distributed.collectives import world_size
from mooring.distributed.dtensor import local_gradient, local_tensor
from mooring.errors import MooringError, NonFiniteError
from mooring.importance import Iteration, State
from mooring.observe.layer_observer import LayerObserver
from mooring.observe.output_observer import Observation, OutputObserver
from mooring.pulls import Budget, GradientPull, ParameterPull, Pull
from mooring.pulls.pull import acts
from mooring.pulls.run_axis import Number
from mooring.state.mooring_state import MooringState, ParameterState, marks
from mooring.state.selection import layer_of, norm_buffers

__all__ = ["TrainingStep"]


class TrainingStep:
    """What happens around `optimizer.step()`.

    Args:
        states: the records of the moored parameters.
        pull: draws them back.
        watch: sees the model's outputs, where the importance needs them.
        layers: sees what goes through layers, where it needs that.
        buffers: what becomes of normalisation statistics: "follow", "keep" or "interpolate".
        check: whether to stop at gradients that are not finite.
    """

    def __init__(
        self,
        states: MooringState,
        pull: Pull,
        watch: OutputObserver | None,
        layers: LayerObserver | None,
        buffers: Literal["follow", "keep", "interpolate"],
        check: bool,
    ) -> None:
        self.states = states
        self.importance = states.importance
        self.pull = pull
        self.watch = watch
        self.layers = layers
        self.buffers = buffers
        self.check = check
        self.buffer_anchors: State = {}
        self.accumulates, self.staging = states.memory.accumulates, states.staging
        self.spending = BudgetSolver(pull, self.staging) if isinstance(pull, Budget) else None
        self.advance = Fused(advancing(self.importance, pull if isinstance(pull, ParameterPull) else None))
        self.load = Fused(loading(pull)) if isinstance(pull, GradientPull) else None
        self.reset()

    def reset(self) -> None:
        """Forget whatever step was under way."""
        self._due: list[ParameterStep] = []
        self._seen = Observation()
        self._laden: list[tuple[Tensor, Tensor, Tensor, int]] = []
        self._before: dict[Tensor, Tensor] = {}
        self._depth = 0
        self._marks: list[int] = []

    @property
    def interrupted(self) -> bool:
        """Whether the optimizer stopped half-way, so that what is kept is not consistent."""
        return bool(self._before)

    # Before the optimizer's step

    def before(
        self, optimizer: torch.optim.Optimizer, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        """The optimizer's pre-hook. With a closure, the gradient is there only after the closure ran."""
        if self._depth and self._marks == marks(self.states.held()):
            self._depth += 1  # a step that calls its parent's step: torch runs the hooks for both
            return None
        self.unload(finished=False)
        self.reset()
        self._depth = 1
        if len(args) > 1 and args[1] is not None:
            return (args[0], self._once(optimizer, args[1]), *args[2:]), kwargs
        if kwargs.get("closure") is not None:
            return args, {**kwargs, "closure": self._once(optimizer, kwargs["closure"])}
        self._prepare(optimizer)
        return None

    def _once(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure, followed by what comes before a step; to be evaluated once."""
        evaluated = False

        def once() -> Any:
            nonlocal evaluated
            if evaluated:
                raise MooringError("the optimizer evaluates its closure several times in a step and cannot be moored")
            evaluated = True
            loss = closure()
            alone = (
                world_size() == 1
            )  # of several ranks, the gradient that they share decides: all of them stop, or none
            if self.check and alone and isinstance(loss, Tensor) and not bool(loss.isfinite().all()):
                self._check_everything()
                value = loss.detach().mean().item()
                raise NonFiniteError(
                    f"the loss is {value}; nothing was changed: lower the learning rate or the strength"
                )
            self._prepare(optimizer)
            return loss

        return once

    @gc_disabled
    @torch.no_grad()
    def _prepare(self, optimizer: torch.optim.Optimizer) -> None:
        """Collect the task's gradients, check them, put a penalty on top, and remember where parameters are."""
        found_inf = getattr(optimizer, "found_inf", None)
        skipped = found_inf is not None and bool(found_inf)  # by a fused kernel, which divides by the scale otherwise
        scale = getattr(optimizer, "grad_scale", None)
        due = [] if skipped else self._collect(optimizer, scale)
        factors = self.layers.collect() if self.layers else []
        if not due:
            if self.watch:
                self.watch.discard()
            return
        seen = self.watch.collect(self.layers.samples if self.layers else 0) if self.watch else Observation()
        if self.check:
            probes = [(d.moored.name, t) for d in due if (t := seen.of(d.moored.parameter)) is not None]
            check_finite("importance gradient", probes)
        self._load(due, scale)
        self.states.look(factors)
        if self.importance.needs_step and self.accumulates:
            self._before = self._copies(due)
        self._due, self._seen, self._marks = due, seen, marks(self.states.held())

    def _collect(self, optimizer: torch.optim.Optimizer, scale: Tensor | None) -> list[ParameterStep]:
        """The parameters with a gradient, and the gradient of the task's loss for each."""
        due = []
        for group in optimizer.param_groups:
            lr = group.get("lr", 1.0)  # an optimizer without one moves by the gradient itself
            factor: Number | None = -1.0 if group.get("maximize") else None
            if scale is not None:
                factor = scale if factor is None else -scale
            # torch's own optimizers leave gradients as they are, but for Nesterov's foreach form
            safe = type(optimizer).__module__.startswith("torch.optim.") and not group.get("nesterov")
            for p in group["params"]:
                if p.grad is not None and (m := self.states.adopt(p)):
                    due.append(ParameterStep(m, lr, self._task_gradient(m, local_gradient(p), factor, safe), factor))
        return due

    def _task_gradient(self, m: ParameterState, grad: Tensor, factor: Number | None, safe: bool) -> Tensor:
        if factor is not None:
            return grad.to(m.wide) / factor
        if safe or (isinstance(self.pull, GradientPull) and m.previous is not None):
            return grad  # with a penalty the step works on another tensor
        return grad.clone()

    def _check_everything(self, instead: dict[Tensor, Tensor] | None = None) -> None:
        """Stop where a gradient is not finite, moored or not; `instead` has what some parameters are handed."""
        grads = {p: p.grad for p in self.states.held() if p.grad is not None and p.grad.layout == torch.strided}
        checked = {**grads, **(instead or {})}
        what = "penalized gradient" if instead else "gradient"
        check_finite(what, [(self.states.name(p), g) for p, g in checked.items()])

    def _load(self, due: list[ParameterStep], scale: Tensor | None) -> None:
        """g <- g + force, in a gradient of its own, so that the task's can be put back after the step."""
        loads: dict[Tensor, Tensor] = {}
        if isinstance(self.pull, GradientPull):
            assert self.load is not None
            held = [d for d in due if d.moored.previous is not None]
            for places in self.staging.over([d.moored for d in held]):
                loads |= loaded(self.pull, self.load, [held[place] for place in places])
        if self.check:
            try:
                self._check_everything(loads)
            except NonFiniteError:
                self._check_everything()  # it need not be the penalty's fault
                raise
        for p, load in loads.items():
            assert p.grad is not None
            if scale is not None:
                local_tensor(p.grad).div_(scale)  # as the kernel leaves it
            self._laden.append((p, p.grad, load, load._version))
            p.grad = load

    def _copies(self, due: list[ParameterStep]) -> dict[Tensor, Tensor]:
        """Parameters before the step, kept in the memory of `current`, which is computed anew after it."""
        found: dict[Tensor, Tensor] = {}
        for d in due:
            m, current = d.moored, d.moored.state["current"]
            fits = torch.promote_types(current.dtype, m.parameter.dtype) == current.dtype
            found[m.parameter] = current if fits else torch.empty_like(m.theta)
        torch._foreach_copy_(list(found.values()), [d.moored.theta for d in due])
        return found

    # After the optimizer's step

    @gc_disabled
    @torch.no_grad()
    def after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: dict[str, Any]) -> None:
        """The optimizer's post-hook: update the importance, then pull."""
        self._depth -= 1
        if self._depth > 0:
            return
        self.unload(finished=True)
        if not self._due:
            return
        self.states.steps += 1
        pull = None
        if isinstance(self.pull, ParameterPull) and self.states.tasks and acts(self.pull.every, self.states.steps):
            pull = self.pull
        balanced = self.importance.balances and self.accumulates
        if self.accumulates and self.importance.watches == "outputs":  # outputs must depend on it
            for d in self._due:
                d.counts = self._seen.of(d.moored.parameter) is not None
        for d in self._due:
            d.moored.count += d.counts
        # what a parameter with a factor is worth was seen in its layer
        pulls = pull is not None and not balanced
        for group in self._staged([d for d in self._due if not d.moored.factor], pulls):
            for d in self._fused(group, pulls=pulls):
                for piece in tiled(self._named(d, pulls)):
                    if self.accumulates and d.counts:
                        self._update_importance(d.moored, piece)
                    if pull and pulls:
                        pull_back(pull, d.moored, d.lr, piece)
        if pull and balanced:
            factors = self.states.factors()
            for group in self._staged(self._due, pulls=True):
                for d in group:
                    for piece in tiled(self._named(d, pulls=True)):
                        piece["current"] = piece["current"] * factors[layer_of(d.moored.name)]
                        pull_back(pull, d.moored, d.lr, piece)
        if self.spending and self.states.tasks and self.states.steps % self.spending.budget.every == 0:
            moved = [d.moored.parameter for d in self._due]
            self.spending.spend(self.states.records.values(), moved, self.states.tasks)
        self._hold_buffers()
        self.reset()

    def _staged(self, due: list[ParameterStep], pulls: bool) -> Iterator[list[ParameterStep]]:
        """Group by group, with anchors at hand; where nobody reads those, all at once."""
        if pulls or (self.accumulates and self.importance.needs_anchor):
            yield from ([due[place] for place in places] for places in self.staging.over([d.moored for d in due]))
        elif self.accumulates:
            yield due

    def _fused(self, due: list[ParameterStep], *, pulls: bool) -> list[ParameterStep]:
        """Have kernels do what they can, and say who is left."""
        if not any(has_compiler(d.moored.parameter.device) for d in due):
            return due
        counted, other = (True, pulls), (False, pulls)

        def told(place: int) -> KernelArgs:
            d, named = due[place], self._named(due[place], pulls)
            tensors = {slot if slot not in d.moored.state else f"state_{slot}": t for slot, t in named.items()}
            numbers = {"lr": d.lr, "count": d.moored.count, "samples": self._seen.samples}
            return KernelArgs(tensors, numbers, d.moored.wide, kinds[place], moves=d.moored.staged is not None)

        def now(name: str, places: Sequence[int]) -> Sequence[Any]:
            mine = [due[place] for place in places]
            if name == "before":
                return [self._before[d.moored.parameter] for d in mine]
            if name == "probe":
                return [local_tensor(probe) for d in mine if (probe := self._seen.of(d.moored.parameter)) is not None]
            if name == "samples":
                return [self._seen.samples] * len(mine)
            return now_of(name, mine)

        kinds = [counted if self.accumulates and d.counts else other for d in due]
        return [due[place] for place in self.advance.run([d.moored for d in due], kinds, told, now)]

    def forget(self) -> None:
        """What is kept lies elsewhere from now on."""
        self.advance.forget()
        self.staging.forget()
        if self.load:
            self.load.forget()
        if self.spending:
            self.spending.forget()

    @torch.no_grad()
    def end_task(self) -> None:
        """A pull that acts once in a task acts: on the parameters that had a gradient in it."""
        self.forget()
        if not (self.states.tasks and isinstance(self.pull, ParameterPull) and self.pull.every == "task"):
            return
        factors = self.states.factors()
        rates = {p: group.get("lr", 1.0) for group in self.states.optimizer.param_groups for p in group["params"]}
        held = [m for p, m in self.states.records.items() if m.count and m.previous is not None and p in rates]
        for places in self.staging.over(held):
            for m in (held[place] for place in places):
                for piece in tiled({**m.held(), **{slot: t for slot, t in m.state.items() if slot == "current"}}):
                    if "current" in piece:
                        piece["current"] = piece["current"] * factors.get(layer_of(m.name), 1.0)
                    pull_back(self.pull, m, rates[m.parameter], piece)

    def unload(self, *, finished: bool) -> None:
        """Give the parameters their task's gradient back, unless they were given another one since."""
        for p, own, load, version in self._laden:
            if p.grad is load and (finished or load._version == version):
                p.grad = own
        self._laden = []

    def _named(self, d: ParameterStep, pulls: bool) -> State:
        """Everything about a parameter by name; its past where there is a pull, its anchor where somebody reads it."""
        m = d.moored
        before, probe = self._before.get(m.parameter), self._seen.of(m.parameter)
        held = m.held() if pulls else {"theta": m.theta}
        if not pulls and self.importance.needs_anchor:
            held["anchor"] = m.near
        extra = {"before": before, "probe": None if probe is None else local_tensor(probe)}
        return {**held, "g": d.g, **m.state} | {key: tensor for key, tensor in extra.items() if tensor is not None}

    def _update_importance(self, m: ParameterState, piece: State) -> None:
        seen = {key: piece[key] for key in Iteration.TENSORS if key in piece}
        state = {slot: piece[slot] for slot in m.state}
        if not all(t.dtype == m.wide for t in (m.parameter, m.anchor, *state.values()) if t.is_floating_point()):
            seen = {key: tensor.to(m.wide) for key, tensor in seen.items()}
            state = {slot: t.to(m.wide) if t.is_floating_point() else t for slot, t in state.items()}
        self.importance.update(state, Iteration(**seen, samples=self._seen.samples, count=m.count))
        for slot, tensor in state.items():
            if tensor is not piece[slot]:  # kept in a narrower dtype
                piece[slot].copy_(tensor)

    # Normalisation statistics

    def anchor_buffers(self) -> None:
        """A task ends: remember the statistics as they are, where they are to be held."""
        if self.buffers != "follow":
            self.buffer_anchors = {name: buffer.clone() for name, buffer in self._norm_buffers().items()}

    def _norm_buffers(self) -> State:
        return norm_buffers(self.states.model, self.states.exclude, self.states.held())

    def _hold_buffers(self) -> None:
        """Keep the statistics, or bring them half-way back (R at equal importance)."""
        if self.buffers == "follow" or not self.buffer_anchors:
            return
        for name, buffer in self._norm_buffers().items():
            if name in self.buffer_anchors:
                buffer.lerp_(self.buffer_anchors[name], 1.0 if self.buffers == "keep" else 0.5)
