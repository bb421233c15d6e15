"""One training step of a moored model: Algorithm 1 of the paper, in the hooks around `optimizer.step()`.

Before the optimizer's own step, `TrainingStep` collects the task's gradients, and adds the gradient of distillation or
the force of a penalty. After it, the importance is updated, the pull is applied, and forgetting is measured if that is
due. The formulas are in `mooring.rules`, and `mooring.backends.eager` applies them to tensors.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import compress
from typing import Any, Protocol

import torch
from torch import Tensor

from mooring.backends.budget_solver import BudgetSolver
from mooring.backends.closures import calls_its_parent, single_use, with_closure
from mooring.backends.eager import (
    autocast_disabled,
    gc_disabled,
    has_compiler,
    merge_statistics,
    pull_is_due,
    run_in_chunks,
    step_rule,
)
from mooring.backends.gradients import (
    GradientCheck,
    GradientCollector,
    ParameterSteps,
    ReplacedGradients,
    are,
    present_gradients,
    step_tensors,
    versions_of,
)
from mooring.backends.kernels.codegen import Rule
from mooring.backends.kernels.tensor_list import TensorLists
from mooring.backends.product_terms import product_terms
from mooring.backends.step_kernels import StepKernels
from mooring.diagnose.coverage_watch import CoverageWatch
from mooring.distributed.dtensor import local_gradients, local_tensors, version_of, world_size
from mooring.errors import NonFiniteError
from mooring.observe.factor_accumulation import accumulate_factors
from mooring.observe.layer_observer import LayerObserver
from mooring.observe.output_observer import Observation, OutputObserver
from mooring.rules import Budget, GradientPull, ParameterPull, Pull
from mooring.rules.pull import Number, learning_rate
from mooring.state.consolidation import layer_scales
from mooring.state.mooring_state import MooringState
from mooring.state.norm_statistics import NormStatistics
from mooring.state.parameter_state import ParameterState
from mooring.state.selection import layer_of


class StepMeter(Protocol):
    """Measures forgetting during training, such as `mooring.hold.measured_budget.MeasuredBudget`."""

    def gradients(self, parameters: Sequence[Tensor]) -> dict[Tensor, Tensor]:
        """Return what to add to the gradients of these parameters, where it is not 0, in tensors of its own."""

    def after_step(self) -> None:
        """Measure, if that is due after this step."""


class TrainingStep:
    """The hooks around `optimizer.step()`.

    Args:
        states: the states of the moored parameters.
        pull: the pull; None for an estimate, which moves nothing.
        buffers: what becomes of normalization statistics: a mode of `NormStatistics`.
        check: whether to stop at gradients that are not finite; on a GPU one step later, unless it is "wait".
        outputs: takes what the model returns and gives the tensor of its outputs.
        watch: warns of parameters that nothing holds; None for an estimate.

    Attributes:
        outputs: observes the model's outputs, if the importance needs them.
        layers: observes the model's layers, if the importance needs them.
        budget: solves a budget.
        meter: measures what a budget spends, and distils.
    """

    def __init__(
        self,
        states: MooringState,
        pull: Pull | None,
        buffers: str,
        check: bool | str,
        outputs: Callable[[Any], Tensor] | None = None,
        watch: CoverageWatch | None = None,
    ) -> None:
        self.states, self.importance, self.pull = states, states.importance, pull
        self.check, self.watch = check, watch
        self.accumulates = states.memory.accumulates
        self.outputs: OutputObserver | None = None
        self.layers: LayerObserver | None = None
        if self.accumulates:
            self.outputs, self.layers = _make_observers(states, outputs)
        self.norms = NormStatistics(states.model, states.exclude, states.optimizer_parameters, buffers, pull)
        self.budget = BudgetSolver(pull, states.offload) if isinstance(pull, Budget) else None
        self.meter: StepMeter | None = None
        self._kernels: StepKernels | None = None
        self._lists = TensorLists()
        self._collector = GradientCollector(states, pull)
        self._finite = GradientCheck(states, self._lists)
        self._steps = ParameterSteps([])
        self.reset()

    def reset(self) -> None:
        """Discard the step under way, if there is one."""
        if self._lists:
            small = self._kernels.small.tensors if self._kernels else []
            self._lists.release([self._steps.parameters, small])
        self._steps.release()
        self._steps = ParameterSteps([])
        self._present: list[Tensor | None] = []
        self._observation = Observation()
        self._replaced: ReplacedGradients | None = None
        self._before: dict[Tensor, Tensor] = {}
        self._depth = 0
        self._versions: list[int] = []

    # Before the optimizer's own step

    def before(
        self, optimizer: torch.optim.Optimizer, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        """Run as the optimizer's pre-hook. With a closure, the gradient exists only after the closure ran."""
        observation = Observation()
        if self._depth and self._has_same_gradients(optimizer):
            if calls_its_parent(optimizer):
                self._depth += 1  # torch runs the hooks for both
                return None
            observation = self._observation  # the step raised, and is taken again with the same gradients
        self.restore_gradients(finished=False)
        self.reset()
        self._depth, self._observation = 1, observation
        if len(args) > 1 or kwargs:

            def after_loss(loss: Any) -> None:
                self._check_loss(loss)
                self.prepare(optimizer)

            if given := with_closure(args, kwargs, lambda closure: single_use(closure, after_loss)):
                return given
        self.prepare(optimizer)
        return None

    @gc_disabled
    @torch.no_grad()
    @autocast_disabled()
    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        """Do what comes before the optimizer's own step."""
        self.report_bad_gradients()
        steps, factors = self.collect_gradients(optimizer)
        if not steps:
            return
        self.warn_of_unheld(steps)
        self.observe_outputs(steps)
        replaced = self.add_distillation(steps) or self.apply_penalty(steps)
        self.check_gradients(steps, replaced)
        self.replace_gradients(optimizer, steps, replaced)
        if self.layers:
            self.accumulate_factors(self.layers, factors, steps)
        if self.importance.needs_step and self.accumulates:
            self._before = _copy_parameters(steps)
        self._steps = steps

    def collect_gradients(self, optimizer: torch.optim.Optimizer) -> tuple[ParameterSteps, dict[Tensor, Any]]:
        """Return the moored parameters with their task's gradient, and the Kronecker factors of this iteration."""
        gradients = present_gradients(optimizer)
        steps = self._collector.collect(optimizer, gradients)
        self._present = gradients if steps else []
        factors = self.layers.collect() if self.layers else {}
        if not steps and self.outputs:
            self.outputs.discard()
        return steps, factors

    def warn_of_unheld(self, steps: ParameterSteps) -> None:
        """Warn of moving parameters that nothing holds, at the first step of a task and where a state is new."""
        created, self.states.created = self.states.created, False
        if created:
            self.invalidate()  # a resized parameter has other tensors
        if (watch := self.watch) is None:
            return
        if watch.stepped:
            parameter, version = watch.stepped
            watch.between_steps = max(watch.between_steps, version_of(parameter) - version)
        if created or not self.states.steps or watch.pending:
            watch.before_step(steps.states, created=created)

    def observe_outputs(self, steps: ParameterSteps) -> None:
        """Take over what was observed of the model's outputs since the last step."""
        if self.outputs and self._observation.is_empty and self.states.reads_outputs:
            self._observation = self.outputs.collect(self.layers.samples if self.layers else 0)
        if self.check and (gradients := self._observation.gradients):
            probed = [state for state in steps.states if state.parameter in gradients]
            names, probes = [state.name for state in probed], [gradients[state.parameter] for state in probed]
            self._finite.check_tensors("importance gradient", names, probes, waits=self._waits)

    def add_distillation(self, steps: ParameterSteps) -> ReplacedGradients | None:
        """Return g + the gradient of distillation, in tensors of their own, if there is a reference to distil."""
        if self.meter is None or not (added := self.meter.gradients(steps.parameters)):
            return None
        factors = dict(zip(steps.parameters, steps.grad_scales, strict=True))
        parameters, distilled, task_gradients = list(added), list[Tensor](), list[Tensor]()
        for p, gradient in added.items():
            assert p.grad is not None
            factor = factors[p]
            distilled.append((gradient if factor is None else gradient.mul_(factor)).to(p.grad.dtype))
            task_gradients.append(p.grad)
        torch._foreach_add_(list(local_tensors(distilled)), local_gradients(parameters))
        return ReplacedGradients(parameters, task_gradients, distilled)

    def apply_penalty(self, steps: ParameterSteps) -> ReplacedGradients | None:
        """Return g + force, in tensors of their own, if the pull is a penalty and there is a past."""
        if not isinstance(self.pull, GradientPull):
            return None
        replaced: ReplacedGradients | None = None
        for group in self._with_anchors(steps.part("past", lambda state: state.previous is not None)):
            penalized = self.kernels.penalize(self.pull, group)
            own = ReplacedGradients(group.parameters, group.own_gradients, penalized)
            replaced = own if not replaced else replaced.joined(own)
        return replaced or None

    def check_gradients(self, steps: ParameterSteps, replaced: ReplacedGradients | None) -> None:
        """Raise if a gradient that the optimizer will get is not finite."""
        if not self.check:
            return
        try:
            self._finite.check(steps, replaced, takes_all=self._collector.takes_all, waits=self._waits)
        except NonFiniteError:
            self._finite.check_task(waits=self._waits)  # the task's own gradient may be the cause
            raise

    def replace_gradients(
        self, optimizer: torch.optim.Optimizer, steps: ParameterSteps, replaced: ReplacedGradients | None
    ) -> None:
        """Give the optimizer the gradients with distillation or a penalty, and remember which gradients it gets."""
        if replaced:
            if steps.scale is not None:
                replaced.unscale(steps.scale)
            self._replaced = replaced
            replaced.set()
            if replaced.parameters is steps.parameters and len(steps) == len(self._present):
                self._present = [*replaced.replacements]
            else:
                self._present = present_gradients(optimizer)
        self._versions = versions_of(self._present)

    def accumulate_factors(self, layers: LayerObserver, factors: dict[Tensor, Any], steps: ParameterSteps) -> None:
        """Add the Kronecker factors of an iteration in which layers are observed."""
        gradients = zip(steps.parameters, steps.g, strict=True)
        if layers.due and accumulate_factors(self.states, factors, dict(gradients)):
            self.invalidate()
            steps.forget_parts()
        layers.hook_layers()

    # After the optimizer's own step

    @gc_disabled
    @torch.no_grad()
    @autocast_disabled()
    def after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: dict[str, Any]) -> None:
        """Run as the optimizer's post-hook."""
        self._depth -= 1
        if self._depth > 0:
            return
        self.restore_gradients(finished=True)
        if not (steps := self._steps):
            return
        self.count_iteration(steps)
        due = self.pull is not None and pull_is_due(self.pull, self.states.tasks, self.states.steps)
        self.update_importance(steps, pulls=due)
        if due:
            self.apply_pull(steps)
        moved = steps.parameters[0]
        self.reset()
        self.measure_if_due()
        if self.watch:
            self.watch.stepped = moved, version_of(moved)

    def count_iteration(self, steps: ParameterSteps) -> None:
        """Count the step, and the iterations that change the importance of each parameter."""
        self.states.steps += 1
        if self.accumulates and self.importance.watches == "outputs":
            probes = self._observation.gradients  # it learns nothing of parameters on which the outputs do not depend
            steps.updates = [probes.get(p) is not None for p in steps.parameters]
        for state in steps.states if steps.updates is None else compress(steps.states, steps.updates):
            state.count += 1

    def update_importance(self, steps: ParameterSteps, *, pulls: bool) -> None:
        """Update the importance of each parameter, then pull it, in one pass over memory.

        A pull whose scores are balanced over a layer waits until all are updated. Parameters with factors have none.
        """
        pulls = pulls and isinstance(self.pull, ParameterPull) and not self._balances
        if not (self.accumulates or pulls):
            return
        samples, probes = self._observation.samples, self._observation.gradients
        scored, needs_anchor = steps.part("scores", lambda state: state.has_scores), self.importance.needs_anchor
        for group in self._with_anchors(scored) if pulls or needs_anchor else [scored]:
            remaining: Sequence[int] = range(len(group))
            if any(has_compiler(p.device) for p in group.parameters):
                accumulates = self.accumulates
                own = self._before, probes, samples
                remaining = self.kernels.run_step(group, *own, accumulates=accumulates, pulls=pulls)
            for index in remaining:
                updates, state = group.updates is None or group.updates[index], group.states[index]
                tensors = step_tensors(group, index, self._before, probes, pulls=pulls, needs_anchor=needs_anchor)
                numbers = {"lr": group.rates[index], "count": state.count, "samples": samples}
                rule = self._step_rule(pulls=pulls, updates=self.accumulates and updates)
                run_in_chunks(rule, tensors, numbers, state.compute_dtype)

    def apply_pull(self, steps: ParameterSteps) -> None:
        """Apply a pull that reads more than one parameter: with balanced scores, on products, or within a budget."""
        if isinstance(self.pull, ParameterPull):
            if self._balances:
                self._pull_states(steps.states, steps.rates)
            if self.states.products.by_b:
                self._pull_products(self.pull, steps)
        elif self.budget and self.budget.acts:
            self.budget.apply_pull(self.states.records.values(), steps.parameters, self.states.tasks)

    def measure_if_due(self) -> None:
        """Measure forgetting, every few steps."""
        if self.meter:
            self.meter.after_step()

    def _pull_states(self, states: list[ParameterState], rates: Sequence[Number]) -> None:
        """Pull parameters whose importance is complete, with the scores of each layer rescaled if they are balanced."""
        scales, rule = layer_scales(self.states.records.values(), self.importance), self._step_rule(pulls=True)
        for indices in self._staged(states):
            for state, rate in ((states[index], rates[index]) for index in indices):
                tensors, numbers = state.pull_tensors(), {"lr": rate}
                if "current" in state.importance_state:
                    tensors["state_current"] = state.importance_state["current"]
                if scales:
                    numbers["layer_scale"] = scales[layer_of(state.name)]
                run_in_chunks(rule, tensors, numbers, state.compute_dtype)

    def _pull_products(self, pull: ParameterPull, steps: ParameterSteps) -> None:
        """Pull the low-rank products whose B had a gradient."""
        for state, rate in zip(steps.states, steps.rates, strict=True):
            for term in product_terms([state]):
                term.pull_with(pull, rate)

    # At the end of a task

    @torch.no_grad()
    @autocast_disabled()
    def end_task(self) -> None:
        """Apply a pull that acts once per task, or a budget's that is not due, to parameters that had a gradient."""
        if self.budget and self.states.tasks and self.states.steps % self.budget.budget.every:
            trained = [p for p, state in self.states.records.items() if state.count and p.requires_grad]
            self.budget.apply_pull(self.states.records.values(), trained, self.states.tasks)
        if not (self.states.tasks and isinstance(self.pull, ParameterPull) and self.pull.every == "task"):
            return
        groups = self.states.optimizer.param_groups
        rates = {p: learning_rate(group, self._collector.rate_reader) for group in groups for p in group["params"]}
        known = (s for s in self.states.records.values() if s.count and s.previous is not None)
        moved = [state for state in known if state.parameter in rates]
        self._pull_states(moved, [rates[state.parameter] for state in moved])
        for statistics, anchor in self.norms.to_merge():
            merge_statistics(self.pull, statistics, anchor, self.states.tasks, next(iter(rates.values()), 1.0))

    # What is known of the step under way, and from step to step

    def restore_gradients(self, *, finished: bool) -> None:
        """Restore the task's gradients, except of parameters that were given another one since."""
        if self._replaced:
            self._replaced.restore(finished=finished)
            self._replaced = None

    def invalidate(self) -> None:
        """Discard plans of kernels and copies of anchors: tensors that are kept have other addresses now."""
        if self._kernels:
            self._kernels.invalidate()
        self._collector.forget()
        self._steps.forget_parts()
        self.states.invalidate_staged()
        if self.budget:
            self.budget.invalidate()

    def report_bad_gradients(self) -> None:
        """Raise if a gradient of a step that is over was not finite and was replaced by 0."""
        self._finite.report()

    @property
    def interrupted(self) -> bool:
        """Whether the optimizer stopped half-way, so that the state is not consistent."""
        return bool(self._before)

    @property
    def observers(self) -> list[OutputObserver | LayerObserver]:
        """The observers of the model."""
        return [observer for observer in (self.outputs, self.layers) if observer]

    @property
    def kernels(self) -> StepKernels:
        """The kernels, which a CPU needs for penalties alone."""
        if self._kernels is None:
            self._kernels = StepKernels(self.importance, self.pull, self._lists)
        return self._kernels

    @property
    def _balances(self) -> bool:
        """Whether a layer's scale depends on all its scores, so that the pull comes after all updates."""
        return self.importance.balances and self.accumulates

    @property
    def _waits(self) -> bool:
        """Whether the host waits for the check of gradients on a GPU.

        A step later is too late for the inputs of a layer, of which the factors are a sum, except in an estimate, which
        is thrown away then.
        """
        return self.check == "wait" or (self.watch is not None and self.layers is not None and self.layers.due)

    def _has_same_gradients(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether every parameter has the gradient that the step under way gave it, and nothing wrote to it."""
        gradients = present_gradients(optimizer)
        return are(gradients, self._present) and versions_of(gradients) == self._versions

    def _check_loss(self, loss: Any) -> None:
        """Raise if the loss of a closure is not finite."""
        one_rank = world_size() == 1  # several ranks decide by the gradient they share, so that all stop or none
        waits = isinstance(loss, Tensor) and (self.check == "wait" or not has_compiler(loss.device))
        if self.check and one_rank and waits and not bool(loss.isfinite().all()):
            self._finite.check_task(waits=self._waits)
            value = loss.detach().mean().item()
            raise NonFiniteError(f"the loss is {value}; nothing was changed: lower the learning rate or the strength")

    def _step_rule(self, *, pulls: bool, updates: bool = False) -> Rule:
        pull = self.pull if pulls and isinstance(self.pull, ParameterPull) else None
        return step_rule(self.importance, pull, updates=updates)

    def _with_anchors(self, steps: ParameterSteps) -> Iterator[ParameterSteps]:
        """Yield the steps in groups whose anchors are on the device: all at once unless anchors are offloaded."""
        yield from map(steps.chosen, self._staged(steps.states))

    def _staged(self, states: list[ParameterState]) -> Iterable[Sequence[int]]:
        """Return the indices of states, in groups whose anchors are on the device."""
        return self.states.offload.groups(states) if self.states.offload else [range(len(states))]


def _copy_parameters(steps: ParameterSteps) -> dict[Tensor, Tensor]:
    """Return the parameters before the step, stored in the memory of `current`, which is replaced after it."""
    copies: dict[Tensor, Tensor] = {}
    for state in steps.states:
        current = state.importance_state["current"]
        exact = torch.promote_types(current.dtype, state.parameter.dtype) == current.dtype
        copies[state.parameter] = current if exact else torch.empty_like(state.theta)
    torch._foreach_copy_(list(copies.values()), [state.theta for state in steps.states])
    return copies


def _make_observers(
    states: MooringState, outputs: Callable[[Any], Tensor] | None = None
) -> tuple[OutputObserver | None, LayerObserver | None]:
    """Create the observers of outputs and of layers that an importance needs; None for each that it does not need."""
    importance = states.importance
    watches = importance.watches != "nothing"
    output_observer = OutputObserver(states.model, importance, states, outputs) if watches else None
    if not importance.by_layer and not states.products:
        return output_observer, None
    batch_size = getattr(importance, "batch_size", None)

    def predictions() -> float | Tensor:
        if batch_size:
            return float(batch_size) / world_size()
        return output_observer.observation.samples if output_observer else 0.0

    return output_observer, LayerObserver(states, predictions)
