"""One training step of a moored model: Algorithm 1 of the paper, in the hooks around `optimizer.step()`.

`TrainingStep.before` collects the task's gradients and applies a penalty. The optimizer steps. `TrainingStep.after`
updates the importance and applies the pull. The formulas are in `mooring.importance` and `mooring.pulls`; the rules
that apply them to tensors are in `mooring.backends.eager`.
"""

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from operator import is_
from types import FrameType
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from mooring.backends.budget_solver import BudgetSolver
from mooring.backends.eager import (
    autocast_disabled,
    gc_disabled,
    has_compiler,
    merge_statistics,
    penalty_rule,
    pull_is_due,
    run_in_chunks,
    step_rule,
)
from mooring.backends.finite_guard import FiniteGuard
from mooring.backends.fused import FusedRule, KernelArgs
from mooring.backends.kernels.multi_tensor import addresses_of
from mooring.backends.product_terms import product_terms
from mooring.diagnose.coverage_watch import CoverageWatch
from mooring.diagnose.finite import check_finite
from mooring.distributed.collectives import world_size
from mooring.distributed.dtensor import local_gradients, local_tensor, local_tensors
from mooring.errors import MooringError, NonFiniteError
from mooring.importance import State
from mooring.importance.observed_factors import ObservedFactors
from mooring.observe.factor_accumulation import accumulate_factors
from mooring.observe.layer_observer import LayerObserver
from mooring.observe.output_observer import Observation, OutputObserver
from mooring.pulls import Budget, GradientPull, ParameterPull, Pull
from mooring.pulls.pull import Number, learning_rate
from mooring.state.mooring_state import MooringState, ParameterState, gradient_versions, layer_scales
from mooring.state.norm_statistics import NormStatistics
from mooring.state.selection import layer_of

SMALL_GRADIENT = 1 << 14
"""Weights of a parameter whose penalized gradient is kept between steps."""


T = TypeVar("T")

NO_GRADIENT = torch.empty(0)
"""Stands for the gradient between steps."""


@dataclass(slots=True)
class ParameterStep:
    """A parameter that has a gradient in this step.

    Attributes:
        state: the parameter's state.
        lr: its learning rate.
        g: the gradient of the task's loss on this rank's part; nothing writes to it until the step is over.
        grad_scale: the factor of g in the gradient that the optimizer gets: -1 if it maximizes, GradScaler's scale if a
            fused kernel unscales; None is 1.
        updates: whether this step changes the importance of the parameter.
    """

    state: ParameterState
    lr: Number
    g: Tensor
    grad_scale: Number | None
    updates: bool = True

    def numbers(self) -> dict[str, Number]:
        """Return the learning rate, and the factor of the gradient if there is one."""
        return {"lr": self.lr} if self.grad_scale is None else {"lr": self.lr, "grad_scale": self.grad_scale}


class _GroupSteps:
    """The steps of a group of the optimizer, kept as long as its parameters and their states are the same.

    Attributes:
        parameters: the moored parameters that had a gradient in the last step.
        steps: their steps.
    """

    def __init__(self) -> None:
        self.parameters: list[Tensor] = []
        self.steps: list[ParameterStep] = []
        self._all: list[Tensor] = []  # with those that are not moored
        self._free: list[Tensor] = []
        self._shapes: list[torch.Size] = []
        self._dtypes: list[torch.dtype] = []

    def matches(self, parameters: list[Tensor], states: MooringState) -> bool:
        """Return whether these are the parameters of the last step, and have the shapes and dtypes of then."""
        return (
            _are(parameters, self._all)
            and [p.shape for p in self.parameters] == self._shapes
            and [p.dtype for p in self.parameters] == self._dtypes
            and not any(p in states.names for p in self._free)
        )

    def remember(self, parameters: list[Tensor], states: MooringState) -> None:
        """Find the states of the parameters that have a gradient now."""
        pairs = [(p, states.get_or_create(p)) for p in parameters]
        self._all, self._free = parameters, [p for p, state in pairs if state is None]
        moored = [state for _, state in pairs if state is not None]
        self.parameters = [state.parameter for state in moored]
        self.steps = [ParameterStep(state, 0.0, NO_GRADIENT, None) for state in moored]
        self._shapes, self._dtypes = [s.shape for s in moored], [s.dtype for s in moored]


@dataclass(slots=True)
class PenalizedGradients:
    """Gradients with a penalty, in the place of the task's until the step is over.

    They are in lists, because an object for each of thousands of parameters makes Python's collector run in each step.

    Attributes:
        parameters: the parameters.
        task_gradients: the gradients of the task's loss, to be restored.
        penalized: the gradients that the optimizer gets.
        versions: their versions when they were set.
    """

    parameters: list[Tensor] = field(default_factory=list)
    task_gradients: list[Tensor] = field(default_factory=list)
    penalized: list[Tensor] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


class StepMeter(Protocol):
    """Measures forgetting during training: `mooring.gauge.measured_budget.MeasuredBudget`."""

    def gradients(self, parameters: Sequence[Tensor]) -> dict[Tensor, Tensor]:
        """Return what to add to the gradients of these parameters, where it is not 0, in tensors of its own."""

    def after_step(self) -> None:
        """Measure, if that is due after this step."""


class TrainingStep:
    """The hooks around `optimizer.step()`.

    Args:
        states: the states of the moored parameters.
        pull: the pull.
        outputs: observes the model's outputs, if the importance needs them.
        layers: observes the model's layers, if the importance needs them.
        buffers: what becomes of normalization statistics: a mode of `NormStatistics`.
        check: whether to stop at gradients that are not finite; on a GPU one step later, unless it is "wait".
        watch: warns of parameters that nothing holds; None for an estimate, which moves nothing.
    """

    def __init__(
        self,
        states: MooringState,
        pull: Pull,
        outputs: OutputObserver | None,
        layers: LayerObserver | None,
        buffers: str,
        check: bool | str,
        watch: CoverageWatch | None = None,
    ) -> None:
        self.states = states
        self.watch = watch
        self.importance = states.importance
        self.pull = pull
        self.outputs = outputs
        self.layers = layers
        self.norms = NormStatistics(states.model, states.exclude, states.optimizer_parameters, buffers, pull)
        self.check = check
        self.guard: FiniteGuard | None = None
        self.accumulates = states.memory.accumulates
        self.offload = states.offload if states.memory.host else None
        self._rate_reader = type(pull).__name__ if getattr(pull, "reads_lr", False) else ""
        self.budget = BudgetSolver(pull, states.offload) if isinstance(pull, Budget) else None
        self.meter: StepMeter | None = None
        self.fused_step = FusedRule(lambda kind: self._step_rule(*kind))
        self.fused_penalty = FusedRule(lambda kind: penalty_rule(pull)) if isinstance(pull, GradientPull) else None
        self._small_gradients: list[Tensor | None] = []
        self._steps: list[ParameterStep] = []
        self._kept_groups: list[_GroupSteps] = []
        self._kept_states: list[ParameterState] = []
        self._small_key: tuple[object, ...] = ()
        self._named: tuple[list[int], list[str], list[Tensor]] = [], [], []  # with references, so that ids stay theirs
        self.reset()

    def reset(self) -> None:
        """Discard the step under way, if there is one."""
        for step in self._steps:
            step.g = NO_GRADIENT  # the object is kept for the next step, and the gradient's memory is not
        self._steps = []
        self._observation = Observation()
        self._penalized = PenalizedGradients()
        self._before: dict[Tensor, Tensor] = {}
        self._depth = 0
        self._versions: list[int] = []

    @property
    def interrupted(self) -> bool:
        """Whether the optimizer stopped half-way, so that the state is not consistent."""
        return bool(self._before)

    # Before the optimizer's step

    def before(
        self, optimizer: torch.optim.Optimizer, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        """Run as the optimizer's pre-hook. With a closure, the gradient exists only after the closure ran."""
        observation = Observation()
        if self._depth and self._versions == gradient_versions(self.states.optimizer_parameters()):
            if _calls_itself(optimizer, sys._getframe(1)):
                self._depth += 1  # a step that calls its parent's step: torch runs the hooks for both
                return None
            observation = self._observation  # the step raised, and is taken again with the same gradients
        self.restore_gradients(finished=False)
        self.reset()
        self._depth, self._observation = 1, observation
        if len(args) > 1 and args[1] is not None:
            return (args[0], self._single_use(optimizer, args[1]), *args[2:]), kwargs
        if kwargs.get("closure") is not None:
            return args, {**kwargs, "closure": self._single_use(optimizer, kwargs["closure"])}
        self._prepare(optimizer)
        return None

    def _single_use(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return the closure followed by `_prepare`; it refuses a second evaluation."""
        evaluated = False

        def wrapper() -> Any:
            nonlocal evaluated
            if evaluated:
                raise MooringError("the optimizer evaluates its closure several times in a step and cannot be moored")
            evaluated = True
            loss = closure()
            one_rank = world_size() == 1  # several ranks decide by the gradient they share, so that all stop or none
            waits = isinstance(loss, Tensor) and (self.check == "wait" or not has_compiler(loss.device))
            if self.check and one_rank and waits and not bool(loss.isfinite().all()):
                self._check_gradients()
                value = loss.detach().mean().item()
                raise NonFiniteError(
                    f"the loss is {value}; nothing was changed: lower the learning rate or the strength"
                )
            self._prepare(optimizer)
            return loss

        return wrapper

    @gc_disabled
    @torch.no_grad()
    @autocast_disabled()
    def _prepare(self, optimizer: torch.optim.Optimizer) -> None:
        """Collect the task's gradients, check them, apply a penalty, and remember the parameters."""
        self.report_bad_gradients()
        found_inf = getattr(optimizer, "found_inf", None)
        skipped = found_inf is not None and bool(found_inf)  # a fused kernel skips the step by itself
        scale = getattr(optimizer, "grad_scale", None)  # a fused kernel divides gradients by it
        steps = [] if skipped else self._collect_gradients(optimizer, scale)
        factors = self.layers.collect() if self.layers else {}
        if not steps:
            if self.outputs:
                self.outputs.discard()
            return
        created, self.states.created = self.states.created, False
        if created:
            self.invalidate()  # a resized parameter has other tensors
        if self.watch and (created or not self.states.steps or self.watch.pending):
            self.watch.before_step((step.state for step in steps), created=created)
        observation = self._observation
        if self.outputs and observation.is_empty and self.states.reads_outputs:
            observation = self.outputs.collect(self.layers.samples if self.layers else 0)
        if self.check and observation.gradients:
            probed = [step.state for step in steps if step.state.parameter in observation.gradients]
            probes = [observation.gradients[state.parameter] for state in probed]
            self._check_finite("importance gradient", [state.name for state in probed], probes)
        self._apply_penalty(steps, scale)
        if self.layers:
            self._accumulate_factors(self.layers, factors, steps)
        if self.importance.needs_step and self.accumulates:
            self._before = self._copy_parameters(steps)
        self._steps, self._observation = steps, observation
        self._versions = gradient_versions(self.states.optimizer_parameters())

    def _accumulate_factors(
        self, layers: LayerObserver, factors: dict[Tensor, ObservedFactors], steps: list[ParameterStep]
    ) -> None:
        """Add the Kronecker factors of an iteration in which layers are observed."""
        if layers.due and accumulate_factors(self.states, factors, {step.state.parameter: step.g for step in steps}):
            self.invalidate()
        layers.hook_layers()

    def _collect_gradients(self, optimizer: torch.optim.Optimizer, scale: Tensor | None) -> list[ParameterStep]:
        """Return the moored parameters that have a gradient, with the gradient of the task's loss."""
        steps: list[ParameterStep] = []
        groups, states = optimizer.param_groups, list(self.states.records.values())
        if len(groups) != len(self._kept_groups) or not _are(states, self._kept_states):
            self._kept_groups = [_GroupSteps() for _ in groups]
        self._kept_states = states  # of before this step, which may create or replace some
        for group, known in zip(groups, self._kept_groups, strict=True):
            lr = group.get("lr", 1.0)
            lr = learning_rate(group, self._rate_reader) if lr is None else lr
            grad_scale: Number | None = -1.0 if group.get("maximize") else None
            if scale is not None:
                grad_scale = scale if grad_scale is None else -scale
            # torch's own optimizers leave gradients as they are, except Nesterov's foreach form
            preserves = type(optimizer).__module__.startswith("torch.optim.") and not group.get("nesterov")
            parameters = [p for p in group["params"] if p.grad is not None]
            if not known.matches(parameters, self.states):
                known.remember(parameters, self.states)
            gradients = local_gradients(known.parameters)
            if grad_scale is not None or not preserves:
                pairs = zip(known.steps, gradients, strict=True)
                gradients = [self._task_gradient(s.state, g, grad_scale, preserves) for s, g in pairs]
            for step, g in zip(known.steps, gradients, strict=True):
                step.lr, step.g, step.grad_scale, step.updates = lr, g, grad_scale, True
            steps += known.steps
        return steps

    def _task_gradient(self, state: ParameterState, grad: Tensor, grad_scale: Number | None, preserves: bool) -> Tensor:
        if grad_scale is not None:
            return grad.to(state.compute_dtype) / grad_scale
        if preserves or (isinstance(self.pull, GradientPull) and state.previous is not None):
            return grad  # with a penalty the optimizer gets another tensor
        return grad.clone()

    def _check_gradients(
        self,
        replaced: Sequence[Tensor] = (),
        penalized: Sequence[Tensor] = (),
        steps: Sequence[ParameterStep] = (),
    ) -> None:
        """Raise if a gradient is not finite, moored or not; those of the parameters `replaced` will be `penalized`."""
        held, strided = self.states.optimizer_parameters(), torch.strided
        parameters = [p for p in held if (g := p.grad) is not None and g.layout is strided]
        if _are(replaced, parameters):
            gradients: Sequence[Tensor] = penalized
        else:
            gradients = [g for p in parameters if (g := p.grad) is not None]
            if replaced:
                instead = dict(zip(replaced, penalized, strict=True))
                gradients = list(map(instead.get, parameters, gradients))
        checked = set(map(id, gradients))
        others = [step.g for step in steps if id(step.g) not in checked]
        kind = "penalized gradient" if penalized else "gradient"
        self._check_finite(kind, self._names_of(parameters), gradients, others)

    def _names_of(self, parameters: list[Tensor]) -> list[str]:
        """Return the names of parameters, which are looked up when other ones are asked for."""
        key = list(map(id, parameters))
        if key != self._named[0]:
            self._named = key, [self.states.name(p) for p in parameters], parameters
        return self._named[1]

    def _check_finite(
        self, what: str, names: Sequence[str], tensors: Sequence[Tensor], others: Sequence[Tensor] = ()
    ) -> None:
        """Raise if a tensor is not finite; on a GPU it and `others` become 0 instead, and the next step raises.

        That is too late for the inputs of a layer, of which the factors are a sum, except in an estimate, which is
        thrown away then.
        """
        waits = self.check == "wait" or (self.watch is not None and self.layers is not None and self.layers.due)
        if not waits and tensors and has_compiler(tensors[0].device):
            self.guard = self.guard or FiniteGuard()
            if self.guard.check(what, names, tensors, others):
                return
        check_finite(what, list(zip(names, tensors, strict=True)))

    def report_bad_gradients(self) -> None:
        """Raise if a gradient of a step that is over was not finite and was replaced by 0."""
        if self.guard:
            self.guard.report()

    def _apply_penalty(self, steps: list[ParameterStep], scale: Tensor | None) -> None:
        """g <- g + force, in a tensor of its own, so that the task's gradient can be restored after the step."""
        parameters: list[Tensor] = []
        penalized: list[Tensor] = []
        if isinstance(self.pull, GradientPull):
            moored = [step for step in steps if step.state.previous is not None]
            for group in self._with_anchors(moored):
                parameters += (own := [step.state.parameter for step in group])
                penalized += self._penalize(self.pull, group, own)
        if self.meter:
            added = self._with_meter(self.meter, steps)
            parameters, penalized = list(added), list(added.values())
        if self.check:
            try:
                self._check_gradients(parameters, penalized, steps)
            except NonFiniteError:
                self._check_gradients()  # the task's own gradient may be the cause
                raise
        if not penalized:
            return
        task_gradients = [g for p in parameters if (g := p.grad) is not None]
        if scale is not None:
            for g in task_gradients:
                local_tensor(g).div_(scale)  # as the fused kernel leaves it
        versions = [gradient._version for gradient in penalized]
        self._penalized = PenalizedGradients(parameters, task_gradients, penalized, versions)
        for p, gradient in zip(parameters, penalized, strict=True):
            p.grad = gradient

    def _with_meter(self, meter: StepMeter, steps: list[ParameterStep]) -> dict[Tensor, Tensor]:
        """Return the gradients that the meter adds to, in tensors of their own."""
        by_parameter = {step.state.parameter: step for step in steps}
        gradients: dict[Tensor, Tensor] = {}
        for p, added in meter.gradients(list(by_parameter)).items():
            assert p.grad is not None
            factor = by_parameter[p].grad_scale
            gradients[p] = (added if factor is None else added.mul_(factor)).to(p.grad.dtype)
        if gradients:
            torch._foreach_add_(list(local_tensors(list(gradients.values()))), local_gradients(list(gradients)))
        return gradients

    def _penalize(self, pull: GradientPull, steps: list[ParameterStep], parameters: Sequence[Tensor]) -> list[Tensor]:
        """Return the penalized gradient of each parameter, which has a step of its own."""
        gradients = self._penalized_gradients(parameters)
        parts = local_tensors(gradients)

        def args(index: int) -> KernelArgs:
            step, state = steps[index], steps[index].state
            tensors = {**state.pull_tensors(), "g": step.g, "penalized": parts[index]}
            return KernelArgs(tensors, step.numbers(), state.compute_dtype, anchor_moves=state.staged is not None)

        def current(name: str, indices: Sequence[int]) -> Sequence[Any]:
            if name == "penalized":
                return _chosen(parts, indices)
            return _current_values(name, _chosen(steps, indices))

        remaining = list(range(len(steps)))
        if self.fused_penalty and any(has_compiler(step.state.parameter.device) for step in steps):
            kinds = [step.grad_scale is None for step in steps]
            remaining = self.fused_penalty.run([step.state for step in steps], kinds, args, current)
        for index in remaining:
            arg = args(index)
            run_in_chunks(penalty_rule(pull), arg.tensors, arg.numbers, arg.dtype)
        return gradients

    def _penalized_gradients(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors for the penalized gradients of parameters; small ones are kept from step to step.

        To allocate one takes as long as the whole step of a small parameter, and so does a look at its form: small ones
        are all kept as long as the parameters, which a model may replace, are where they were.
        """
        key = [*map(id, parameters)], addresses_of(parameters), [*map(Tensor.stride, parameters)]
        known = self._small_gradients
        if key != self._small_key or any(map(is_, known, [p.grad for p in parameters])):
            known = [None if p.numel() > SMALL_GRADIENT else torch.empty_like(p) for p in parameters]
            self._small_key, self._small_gradients = key, known
        return [torch.empty_like(p) if t is None else t for t, p in zip(known, parameters, strict=True)]

    def _copy_parameters(self, steps: list[ParameterStep]) -> dict[Tensor, Tensor]:
        """Return the parameters before the step, stored in the memory of `current`, which is computed anew after it."""
        copies: dict[Tensor, Tensor] = {}
        for step in steps:
            state, current = step.state, step.state.importance_state["current"]
            exact = torch.promote_types(current.dtype, state.parameter.dtype) == current.dtype
            copies[state.parameter] = current if exact else torch.empty_like(state.theta)
        torch._foreach_copy_(list(copies.values()), [step.state.theta for step in steps])
        return copies

    # After the optimizer's step

    @gc_disabled
    @torch.no_grad()
    @autocast_disabled()
    def after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: dict[str, Any]) -> None:
        """Run as the optimizer's post-hook: update the importance, then pull."""
        self._depth -= 1
        if self._depth > 0:
            return
        self.restore_gradients(finished=True)
        if not self._steps:
            return
        self.states.steps += 1
        if self.accumulates and self.importance.watches == "outputs":
            for step in self._steps:  # it learns nothing of parameters on which the outputs do not depend
                step.updates = self._observation.gradients.get(step.state.parameter) is not None
        for step in self._steps:
            step.state.count += step.updates
        due = pull_is_due(self.pull, self.states.tasks, self.states.steps)
        pulls = due and isinstance(self.pull, ParameterPull)
        balanced = self.importance.balances and self.accumulates
        self._update_importance_and_pull(pulls=pulls and not balanced)
        if pulls and balanced:  # a layer's scale depends on all its scores, so the pull comes after all updates
            self._pull_balanced()
        if pulls and self.states.products.by_b:
            self._pull_products()
        if due and self.budget:
            moved = [step.state.parameter for step in self._steps]
            self.budget.apply_pull(self.states.records.values(), moved, self.states.tasks)
        if self.norms.anchors:
            self.norms.after_step()
        self.reset()
        if self.meter:
            self.meter.after_step()

    def _update_importance_and_pull(self, *, pulls: bool) -> None:
        """Update the importance of each parameter, then pull it; parameters with factors have no scores."""
        if not (self.accumulates or pulls):
            return
        steps = [step for step in self._steps if step.state.has_scores]
        reads_anchor = pulls or self.importance.needs_anchor
        for group in self._with_anchors(steps) if reads_anchor else [steps]:
            for step in self._run_fused(group, pulls):
                rule = self._step_rule(self.accumulates and step.updates, pulls)
                numbers = {"lr": step.lr, "count": step.state.count, "samples": self._observation.samples}
                run_in_chunks(rule, self._tensors(step, pulls), numbers, step.state.compute_dtype)

    def _step_rule(self, updates: bool, pulls: bool) -> Any:
        pull = self.pull if pulls and isinstance(self.pull, ParameterPull) else None
        return step_rule(self.importance, pull, updates=updates)

    def _pull_balanced(self) -> None:
        """Pull with the scores of each layer rescaled."""
        scales = layer_scales(self.states.records.values(), self.importance)
        rule = self._step_rule(False, True)
        for group in self._with_anchors(self._steps):
            for step in group:
                numbers = {"lr": step.lr, "layer_scale": scales[layer_of(step.state.name)]}
                run_in_chunks(rule, self._tensors(step, True), numbers, step.state.compute_dtype)

    def _pull_products(self) -> None:
        """Pull the low-rank products whose B had a gradient."""
        assert isinstance(self.pull, ParameterPull)
        for step in self._steps:
            for term in product_terms([step.state]):
                term.pull_with(self.pull, step.lr)

    def _with_anchors(self, steps: list[ParameterStep]) -> Iterator[list[ParameterStep]]:
        """Yield the steps in groups whose anchors are on the device: all at once unless anchors are offloaded."""
        if self.offload is None:
            yield steps
            return
        for indices in self.offload.groups([step.state for step in steps]):
            yield [steps[index] for index in indices]

    def _run_fused(self, steps: list[ParameterStep], pulls: bool) -> list[ParameterStep]:
        """Run the step rule in kernels where possible, and return the remaining parameters."""
        if not any(has_compiler(step.state.parameter.device) for step in steps):
            return steps

        def args(index: int) -> KernelArgs:
            state = steps[index].state
            numbers = {"lr": steps[index].lr, "count": state.count, "samples": self._observation.samples}
            tensors, moves = self._tensors(steps[index], pulls), state.staged is not None
            return KernelArgs(tensors, numbers, state.compute_dtype, kinds[index], anchor_moves=moves)

        def current(name: str, indices: Sequence[int]) -> Sequence[Any]:
            chosen = _chosen(steps, indices)
            if name == "before":
                return [self._before[step.state.parameter] for step in chosen]
            if name == "probe":
                probes = (self._observation.gradients.get(step.state.parameter) for step in chosen)
                return [local_tensor(probe) for probe in probes if probe is not None]
            if name == "samples":
                return [self._observation.samples] * len(chosen)
            return _current_values(name, chosen)

        updating, resting = (self.accumulates, pulls), (False, pulls)
        kinds = [updating if step.updates else resting for step in steps]
        return [steps[index] for index in self.fused_step.run([s.state for s in steps], kinds, args, current)]

    def _tensors(self, step: ParameterStep, pulls: bool) -> State:
        """Return the tensors of a parameter by name: its past only for a pull, its anchor only if it is read."""
        state = step.state
        tensors = state.pull_tensors() if pulls else {"theta": state.theta}
        if not pulls and self.importance.needs_anchor:
            tensors["anchor"] = state.device_anchor
        tensors["g"] = step.g
        tensors |= {f"state_{slot}": tensor for slot, tensor in state.importance_state.items()}
        if (before := self._before.get(state.parameter)) is not None:
            tensors["before"] = before
        if (probe := self._observation.gradients.get(state.parameter)) is not None:
            tensors["probe"] = local_tensor(probe)
        return tensors

    def restore_gradients(self, *, finished: bool) -> None:
        """Restore the task's gradients, except of parameters that were given another one since."""
        set_aside = self._penalized
        lists = set_aside.parameters, set_aside.task_gradients, set_aside.penalized, set_aside.versions
        for p, task_gradient, penalized, version in zip(*lists, strict=False):  # an error may come before the last
            if p.grad is penalized and (finished or penalized._version == version):
                p.grad = task_gradient
        self._penalized = PenalizedGradients()

    # Between tasks

    def invalidate(self) -> None:
        """Discard plans of kernels and copies of anchors: tensors that are kept have other addresses now."""
        self.fused_step.invalidate()
        self._small_gradients, self._small_key, self._kept_groups = [], (), []
        self.states.offload.invalidate()
        if self.fused_penalty:
            self.fused_penalty.invalidate()
        if self.budget:
            self.budget.invalidate()

    @torch.no_grad()
    @autocast_disabled()
    def end_task(self) -> None:
        """Apply a pull that acts once per task, or a budget's that is not due, to parameters that had a gradient."""
        if self.budget and self.states.tasks and self.states.steps % self.budget.budget.every:
            moved = [p for p, state in self.states.records.items() if state.count and p.requires_grad]
            self.budget.apply_pull(self.states.records.values(), moved, self.states.tasks)
        if not (self.states.tasks and isinstance(self.pull, ParameterPull) and self.pull.every == "task"):
            return
        scales = layer_scales(self.states.records.values(), self.importance)
        groups = self.states.optimizer.param_groups
        rates = {p: learning_rate(group, self._rate_reader) for group in groups for p in group["params"]}
        rule = self._step_rule(False, True)
        for indices in self.states.offload.groups(states := list(self.states.records.values())):
            for state in (states[index] for index in indices):
                if not state.count or state.previous is None or state.parameter not in rates:
                    continue
                tensors, numbers = state.pull_tensors(), {"lr": rates[state.parameter]}
                if "current" in state.importance_state:
                    tensors["state_current"] = state.importance_state["current"]
                if scales:
                    numbers["layer_scale"] = scales[layer_of(state.name)]
                run_in_chunks(rule, tensors, numbers, state.compute_dtype)
        for statistics, anchor in self.norms.to_merge():
            merge_statistics(self.pull, statistics, anchor, self.states.tasks, next(iter(rates.values()), 1.0))


def _calls_itself(optimizer: torch.optim.Optimizer, hook_caller: FrameType) -> bool:
    """Return whether a step of this optimizer is under way above the one whose hooks run now."""
    frame = hook_caller.f_back
    while frame is not None:
        if frame.f_code is hook_caller.f_code and frame.f_locals.get("self") is optimizer:
            return True
        frame = frame.f_back
    return False


def _are(objects: Collection[object], others: Collection[object]) -> bool:
    """Return whether both have the same objects in the same order."""
    return len(objects) == len(others) and all(map(is_, objects, others))


def _chosen(values: Sequence[T], indices: Sequence[int]) -> Sequence[T]:
    """Return the values at increasing indices, which are often all of them."""
    return values if len(indices) == len(values) else [values[index] for index in indices]


def _current_values(name: str, steps: Sequence[ParameterStep]) -> Sequence[Tensor | Number]:
    """Return a tensor or number, by name, of many parameters: what changes for a kernel in every step."""
    if name == "theta":
        return local_tensors([step.state.parameter for step in steps])
    if name == "anchor":
        return [step.state.device_anchor for step in steps]
    if name == "g":
        return [step.g for step in steps]
    if name == "lr":
        return [step.lr for step in steps]
    if name == "grad_scale":
        return [1.0 if step.grad_scale is None else step.grad_scale for step in steps]
    assert name == "count"
    return [step.state.count for step in steps]
