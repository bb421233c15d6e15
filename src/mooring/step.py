"""One training step of a moored model: Algorithm 1 of the paper, in the hooks around `optimizer.step()`.

`TrainingStep.before` collects the task's gradients and applies a penalty. The optimizer steps. `TrainingStep.after`
updates the importance and applies the pull. The formulas are in `mooring.rules` and `mooring.rules`; the rules
that apply them to tensors are in `mooring.backends.eager`.
"""

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import compress
from operator import is_
from types import FrameType
from typing import Any, Protocol, cast

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
from mooring.backends.kernels.tensor_list import TensorList, TensorLists
from mooring.backends.penalized_gradients import PenalizedGradients, SmallGradients
from mooring.backends.product_terms import product_terms
from mooring.curvature.observed_factors import ObservedFactors
from mooring.diagnose.coverage_watch import CoverageWatch
from mooring.diagnose.finite import check_finite
from mooring.distributed.collectives import world_size
from mooring.distributed.dtensor import local_gradients, local_tensor, local_tensors, version_of
from mooring.errors import MooringError, NonFiniteError
from mooring.observe.factor_accumulation import accumulate_factors
from mooring.observe.layer_observer import LayerObserver
from mooring.observe.output_observer import Observation, OutputObserver
from mooring.rules import Budget, GradientPull, ParameterPull, Pull, State
from mooring.rules.pull import Number, learning_rate
from mooring.state.consolidation import layer_scales
from mooring.state.mooring_state import MooringState
from mooring.state.norm_statistics import NormStatistics
from mooring.state.parameter_state import ParameterState, ParameterSteps, select
from mooring.state.selection import layer_of


class _KnownParameters:
    """The parameters of an optimizer, and the steps of those that are moored and had a gradient in the last step.

    Args:
        groups: the parameters of each group of the optimizer.
        gradients: the gradients of all of them.
        states: the states of the model.
    """

    def __init__(self, groups: list[list[Tensor]], gradients: Sequence[Tensor | None], states: MooringState) -> None:
        self._groups, self._records = groups, list(states.records.values())
        self._missing = [g is None for g in gradients]
        index, moored = 0, list[ParameterState]()
        self.indices: list[int] = []
        self.counts: list[int] = []
        self.free: list[Tensor] = []
        for group in groups:
            before = len(moored)
            for p in group:
                if gradients[index] is not None:
                    if (state := states.get_or_create(p)) is None:
                        self.free.append(p)
                    else:
                        moored.append(state)
                        self.indices.append(index)
                index += 1
            self.counts.append(len(moored) - before)
        self.steps = ParameterSteps(moored)
        self._shapes, self._dtypes = [s.shape for s in moored], [s.dtype for s in moored]

    def match(self, groups: list[list[Tensor]], gradients: Sequence[Tensor | None], states: MooringState) -> bool:
        """Return whether the parameters, their shapes, dtypes and states are those of the last step."""
        return (
            len(groups) == len(self._groups)
            and all(map(_are, groups, self._groups))
            and [g is None for g in gradients] == self._missing
            and _are(states.records.values(), self._records)
            and [p.shape for p in self.steps.parameters] == self._shapes
            and [p.dtype for p in self.steps.parameters] == self._dtypes
            and not any(p in states.names for p in self.free)
        )


class StepMeter(Protocol):
    """Measures forgetting during training: `mooring.hold.measured_budget.MeasuredBudget`."""

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
        self._known: _KnownParameters | None = None
        self._steps = ParameterSteps([])
        self._lists = TensorLists()
        self._small = SmallGradients()
        self._named: tuple[list[Tensor], list[str]] = [], []
        self.reset()

    def reset(self) -> None:
        """Discard the step under way, if there is one."""
        if self._lists:
            self._lists.release([self._steps.parameters, self._small.tensors])
        self._steps.release()
        self._steps = ParameterSteps([])
        self._present: list[Tensor | None] = []
        self._observation = Observation()
        self._penalized: PenalizedGradients | None = None
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
        if self._depth and self._has_same_gradients(optimizer):
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

    def _has_same_gradients(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether every parameter has the gradient that the step under way gave it, and nothing wrote to it."""
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
        return _are(gradients, self._present) and _versions(gradients) == self._versions

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
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
        steps = ParameterSteps([]) if skipped else self._collect_gradients(optimizer, gradients, scale)
        factors = self.layers.collect() if self.layers else {}
        if not steps:
            if self.outputs:
                self.outputs.discard()
            return
        created, self.states.created = self.states.created, False
        if created:
            self.invalidate()  # a resized parameter has other tensors
        if self.watch and (last := self.watch.stepped):
            self.watch.between_steps = max(self.watch.between_steps, version_of(last[0]) - last[1])
        if self.watch and (created or not self.states.steps or self.watch.pending):
            self.watch.before_step(steps.states, created=created)
        observation = self._observation
        if self.outputs and observation.is_empty and self.states.reads_outputs:
            observation = self.outputs.collect(self.layers.samples if self.layers else 0)
        if self.check and observation.gradients:
            probed = [state for state in steps.states if state.parameter in observation.gradients]
            probes = [observation.gradients[state.parameter] for state in probed]
            self._check_finite("importance gradient", [state.name for state in probed], probes)
        self._apply_penalty(steps, scale)
        if self.layers:
            self._accumulate_factors(self.layers, factors, steps)
        if self.importance.needs_step and self.accumulates:
            self._before = self._copy_parameters(steps)
        self._steps, self._observation = steps, observation
        self._present = gradients
        if (set_aside := self._penalized) and set_aside.parameters is steps.parameters and len(steps) == len(gradients):
            self._present = [*set_aside.penalized]
        elif set_aside:
            self._present = [p.grad for group in optimizer.param_groups for p in group["params"]]
        self._versions = _versions(self._present)

    def _accumulate_factors(
        self, layers: LayerObserver, factors: dict[Tensor, ObservedFactors], steps: ParameterSteps
    ) -> None:
        """Add the Kronecker factors of an iteration in which layers are observed."""
        gradients = zip(steps.parameters, steps.g, strict=True)
        if layers.due and accumulate_factors(self.states, factors, dict(gradients)):
            self.invalidate()
            steps.forget_parts()
        layers.hook_layers()

    def _collect_gradients(
        self, optimizer: torch.optim.Optimizer, gradients: Sequence[Tensor | None], scale: Tensor | None
    ) -> ParameterSteps:
        """Return the moored parameters that have a gradient, with the gradient of the task's loss."""
        groups = [list(group["params"]) for group in optimizer.param_groups]
        known = self._known
        if known is None or self.states.created or not known.match(groups, gradients, self.states):
            known = self._known = _KnownParameters(groups, gradients, self.states)
        steps = known.steps
        steps.own_gradients = cast("list[Tensor]", select(gradients, known.indices))
        steps.g, steps.rates, steps.grad_scales = local_gradients(steps.parameters, steps.own_gradients), [], []
        steps.plain = steps.g is steps.own_gradients
        for group, count in zip(optimizer.param_groups, known.counts, strict=True):
            lr = group.get("lr", 1.0)
            lr = learning_rate(group, self._rate_reader) if lr is None else lr
            grad_scale: Number | None = -1.0 if group.get("maximize") else None
            if scale is not None:
                grad_scale = scale if grad_scale is None else -scale
            # torch's own optimizers leave gradients as they are, except Nesterov's foreach form
            preserves = type(optimizer).__module__.startswith("torch.optim.") and not group.get("nesterov")
            if grad_scale is not None or not preserves:
                if steps.g is steps.own_gradients:
                    steps.g = [*steps.g]
                here = slice(len(steps.rates), len(steps.rates) + count)
                pairs = zip(steps.states[here], steps.g[here], strict=True)
                steps.g[here] = [self._task_gradient(state, g, grad_scale, preserves) for state, g in pairs]
            steps.rates += [lr] * count
            steps.grad_scales += [grad_scale] * count
        return steps

    def _task_gradient(self, state: ParameterState, grad: Tensor, grad_scale: Number | None, preserves: bool) -> Tensor:
        if grad_scale is not None:
            return grad.to(state.compute_dtype) / grad_scale
        if preserves or (isinstance(self.pull, GradientPull) and state.previous is not None):
            return grad  # with a penalty the optimizer gets another tensor
        return grad.clone()

    def _check_gradients(
        self, replaced: Sequence[Tensor] = (), penalized: Sequence[Tensor] = (), steps: ParameterSteps | None = None
    ) -> None:
        """Raise if a gradient is not finite, moored or not; those of the parameters `replaced` will be `penalized`."""
        kind = "penalized gradient" if penalized else "gradient"
        if steps and self._known and not self._known.free and (not replaced or _are(replaced, steps.parameters)):
            gradients: Sequence[Tensor] = penalized or steps.own_gradients
            others = [] if gradients is steps.g else steps.g
            self._check_finite(kind, self._names_of(steps.parameters), gradients, others)
            return
        held, strided = self.states.optimizer_parameters(), torch.strided
        parameters = [p for p in held if (g := p.grad) is not None and g.layout is strided]
        gradients = [g for p in parameters if (g := p.grad) is not None]
        if replaced:
            instead = dict(zip(replaced, penalized, strict=True))
            gradients = list(map(instead.get, parameters, gradients))
        checked = set(map(id, gradients))
        others = [g for g in steps.g if id(g) not in checked] if steps else []
        self._check_finite(kind, self._names_of(parameters), gradients, others)

    def _names_of(self, parameters: list[Tensor]) -> list[str]:
        """Return the names of parameters; those of the same parameters as before are kept."""
        if not _are(parameters, self._named[0]):
            self._named = parameters, [self.states.name(p) for p in parameters]
        return self._named[1]

    def _check_finite(
        self,
        what: str,
        names: Sequence[str],
        tensors: Sequence[Tensor],
        others: Sequence[Tensor] = (),
    ) -> None:
        """Raise if a tensor is not finite; on a GPU it and `others` become 0 instead, and the next step raises.

        That is too late for the inputs of a layer, of which the factors are a sum, except in an estimate, which is
        thrown away then.
        """
        waits = self.check == "wait" or (self.watch is not None and self.layers is not None and self.layers.due)
        if not waits and tensors and has_compiler(tensors[0].device):
            self.guard = self.guard or FiniteGuard()
            checked = self._lists.find(f"checked {what}", local_tensors(tensors))
            further = self._lists.find("others", local_tensors(others)) if others else None
            if self.guard.check(what, names, checked, further, whole=() if checked.tensors is tensors else tensors):
                return
        check_finite(what, list(zip(names, tensors, strict=True)))

    def report_bad_gradients(self) -> None:
        """Raise if a gradient of a step that is over was not finite and was replaced by 0."""
        if self.guard:
            self.guard.report()

    def _apply_penalty(self, steps: ParameterSteps, scale: Tensor | None) -> None:
        """g <- g + force, in a tensor of its own, so that the task's gradient can be restored after the step."""
        parameters: list[Tensor] = []
        penalized: list[Tensor] = []
        task_gradients: list[Tensor] = []
        if isinstance(self.pull, GradientPull):
            for group in self._with_anchors(steps.part("past", lambda state: state.previous is not None)):
                own = self._penalize(self.pull, group)
                if parameters:
                    parameters, penalized = [*parameters, *group.parameters], [*penalized, *own]
                    task_gradients = [*task_gradients, *group.own_gradients]
                else:  # the lists themselves, whose addresses are known
                    parameters, penalized, task_gradients = group.parameters, own, group.own_gradients
        if self.meter:
            added = self._with_meter(self.meter, steps)
            parameters, penalized = list(added), list(added.values())
            task_gradients = [g for p in parameters if (g := p.grad) is not None]
        if self.check:
            try:
                self._check_gradients(parameters, penalized, steps)
            except NonFiniteError:
                self._check_gradients()  # the task's own gradient may be the cause
                raise
        if not penalized:
            return
        if scale is not None:
            for g in task_gradients:
                local_tensor(g).div_(scale)  # as the fused kernel leaves it
        self._penalized = PenalizedGradients(parameters, task_gradients, penalized)
        self._penalized.set()

    def _with_meter(self, meter: StepMeter, steps: ParameterSteps) -> dict[Tensor, Tensor]:
        """Return the gradients that the meter adds to, in tensors of their own."""
        factors = dict(zip(steps.parameters, steps.grad_scales, strict=True))
        gradients: dict[Tensor, Tensor] = {}
        for p, added in meter.gradients(steps.parameters).items():
            assert p.grad is not None
            factor = factors[p]
            gradients[p] = (added if factor is None else added.mul_(factor)).to(p.grad.dtype)
        if gradients:
            torch._foreach_add_(list(local_tensors(list(gradients.values()))), local_gradients(list(gradients)))
        return gradients

    def _penalize(self, pull: GradientPull, steps: ParameterSteps) -> list[Tensor]:
        """Return the penalized gradient of each parameter, which has a step of its own."""
        theta = self._theta(steps)
        gradients = self._small.allocate(steps.parameters, theta.form, steps.own_gradients)
        parts = local_tensors(gradients)

        def args(index: int) -> KernelArgs:
            state = steps.states[index]
            tensors = {**state.pull_tensors(), "g": steps.g[index], "penalized": parts[index]}
            return KernelArgs(tensors, steps.numbers(index), state.compute_dtype, anchor_moves=state.staged is not None)

        def tensors(name: str) -> TensorList:
            if name == "theta":
                return theta
            return self._lists.find(name, parts) if name == "penalized" else self._present_tensors(name, steps)

        remaining = list(range(len(steps)))
        if self.fused_penalty and _any_has_compiler(steps.parameters):
            kinds = [scale is None for scale in steps.grad_scales]
            remaining = self.fused_penalty.run(steps.states, kinds, args, tensors, lambda name: _numbers(name, steps))
        for index in remaining:
            arg = args(index)
            run_in_chunks(penalty_rule(pull), arg.tensors, arg.numbers, arg.dtype)
        return gradients

    def _copy_parameters(self, steps: ParameterSteps) -> dict[Tensor, Tensor]:
        """Return the parameters before the step, stored in the memory of `current`, which is replaced after it."""
        copies: dict[Tensor, Tensor] = {}
        for state in steps.states:
            current = state.importance_state["current"]
            exact = torch.promote_types(current.dtype, state.parameter.dtype) == current.dtype
            copies[state.parameter] = current if exact else torch.empty_like(state.theta)
        torch._foreach_copy_(list(copies.values()), [state.theta for state in steps.states])
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
        steps = self._steps
        if not steps:
            return
        self.states.steps += 1
        if self.accumulates and self.importance.watches == "outputs":
            probes = self._observation.gradients  # it learns nothing of parameters on which the outputs do not depend
            steps.updates = [probes.get(p) is not None for p in steps.parameters]
        for state in steps.states if steps.updates is None else compress(steps.states, steps.updates):
            state.count += 1
        due = pull_is_due(self.pull, self.states.tasks, self.states.steps)
        pulls = due and isinstance(self.pull, ParameterPull)
        balanced = self.importance.balances and self.accumulates
        self._update_importance_and_pull(pulls=pulls and not balanced)
        if pulls and balanced:  # a layer's scale depends on all its scores, so the pull comes after all updates
            self._pull_balanced()
        if pulls and self.states.products.by_b:
            self._pull_products()
        if due and self.budget:
            self.budget.apply_pull(self.states.records.values(), steps.parameters, self.states.tasks)
        self.reset()
        if self.meter:
            self.meter.after_step()
        if self.watch:
            self.watch.stepped = steps.parameters[0], version_of(steps.parameters[0])

    def _update_importance_and_pull(self, *, pulls: bool) -> None:
        """Update the importance of each parameter, then pull it; parameters with factors have no scores."""
        if not (self.accumulates or pulls):
            return
        steps = self._steps.part("scores", lambda state: state.has_scores)
        reads_anchor = pulls or self.importance.needs_anchor
        for group in self._with_anchors(steps) if reads_anchor else [steps]:
            for index in self._run_fused(group, pulls):
                updates, state = group.updates is None or group.updates[index], group.states[index]
                rule = self._step_rule(self.accumulates and updates, pulls)
                numbers = {"lr": group.rates[index], "count": state.count, "samples": self._observation.samples}
                run_in_chunks(rule, self._tensors(group, index, pulls), numbers, state.compute_dtype)

    def _step_rule(self, updates: bool, pulls: bool) -> Any:
        pull = self.pull if pulls and isinstance(self.pull, ParameterPull) else None
        return step_rule(self.importance, pull, updates=updates)

    def _pull_balanced(self) -> None:
        """Pull with the scores of each layer rescaled."""
        scales = layer_scales(self.states.records.values(), self.importance)
        rule = self._step_rule(False, True)
        for group in self._with_anchors(self._steps):
            for index, state in enumerate(group.states):
                numbers = {"lr": group.rates[index], "layer_scale": scales[layer_of(state.name)]}
                run_in_chunks(rule, self._tensors(group, index, True), numbers, state.compute_dtype)

    def _pull_products(self) -> None:
        """Pull the low-rank products whose B had a gradient."""
        assert isinstance(self.pull, ParameterPull)
        for state, rate in zip(self._steps.states, self._steps.rates, strict=True):
            for term in product_terms([state]):
                term.pull_with(self.pull, rate)

    def _with_anchors(self, steps: ParameterSteps) -> Iterator[ParameterSteps]:
        """Yield the steps in groups whose anchors are on the device: all at once unless anchors are offloaded."""
        if self.offload is None:
            yield steps
            return
        for indices in self.offload.groups(steps.states):
            yield steps.chosen(indices)

    def _run_fused(self, steps: ParameterSteps, pulls: bool) -> Sequence[int]:
        """Run the step rule in kernels where possible, and return the indices of the remaining parameters."""
        if not _any_has_compiler(steps.parameters):
            return range(len(steps))

        def args(index: int) -> KernelArgs:
            state = steps.states[index]
            numbers = {"lr": steps.rates[index], "count": state.count, "samples": self._observation.samples}
            tensors, moves = self._tensors(steps, index, pulls), state.staged is not None
            return KernelArgs(tensors, numbers, state.compute_dtype, kinds[index], anchor_moves=moves)

        def numbers(name: str) -> Sequence[Number]:
            return [self._observation.samples] * len(steps) if name == "samples" else _numbers(name, steps)

        updating, resting = (self.accumulates, pulls), (False, pulls)
        kinds = [updating] * len(steps)
        if steps.updates is not None:
            kinds = [updating if updates else resting for updates in steps.updates]
        return self.fused_step.run(steps.states, kinds, args, lambda name: self._present_tensors(name, steps), numbers)

    def _theta(self, steps: ParameterSteps) -> TensorList:
        """Return the parts of the parameters on this rank, where they are now."""
        parts = steps.parameters if steps.plain else local_tensors(steps.parameters)
        return self._lists.find("theta", parts).replace(parts)

    def _present_tensors(self, name: str, steps: ParameterSteps) -> TensorList:
        """Return the tensors of a name that may be elsewhere in each step, of all parameters."""
        if name == "theta":
            return self._theta(steps)
        if name == "g":
            return self._lists.find(name, steps.g)
        if name == "anchor":
            return self._lists.find(name, [state.device_anchor for state in steps.states])
        tensors = self._before if name == "before" else self._observation.gradients
        own = map(tensors.get, steps.parameters, steps.parameters)  # itself where the kernel that reads it is not for p
        return self._lists.find(name, [local_tensor(t) for t in own])

    def _tensors(self, steps: ParameterSteps, index: int, pulls: bool) -> State:
        """Return the tensors of a parameter by name: its past only for a pull, its anchor only if it is read."""
        state = steps.states[index]
        tensors = state.pull_tensors() if pulls else {"theta": state.theta}
        if not pulls and self.importance.needs_anchor:
            tensors["anchor"] = state.device_anchor
        tensors["g"] = steps.g[index]
        tensors |= {f"state_{slot}": tensor for slot, tensor in state.importance_state.items()}
        if (before := self._before.get(state.parameter)) is not None:
            tensors["before"] = before
        if (probe := self._observation.gradients.get(state.parameter)) is not None:
            tensors["probe"] = local_tensor(probe)
        return tensors

    def restore_gradients(self, *, finished: bool) -> None:
        """Restore the task's gradients, except of parameters that were given another one since."""
        if self._penalized:
            self._penalized.restore(finished=finished)
            self._penalized = None

    # Between tasks

    def invalidate(self) -> None:
        """Discard plans of kernels and copies of anchors: tensors that are kept have other addresses now."""
        self.fused_step.invalidate()
        self._small, self._known = SmallGradients(), None
        self._steps.forget_parts()
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


def _versions(gradients: Sequence[Tensor | None]) -> list[int]:
    """Return numbers that grow when a gradient is written to."""
    return [part._version for part in local_tensors([g for g in gradients if g is not None])]


def _any_has_compiler(parameters: Sequence[Tensor]) -> bool:
    return any(has_compiler(p.device) for p in parameters)


def _numbers(name: str, steps: ParameterSteps) -> Sequence[Number]:
    """Return a number of each parameter, by name."""
    if name == "lr":
        return steps.rates
    if name == "grad_scale":
        return [1.0 if scale is None else scale for scale in steps.grad_scales]
    assert name == "count"
    return [state.count for state in steps.states]
