"""The state of the runs of a fleet that share a method: the core's `ParameterState` with a run axis."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from mooring.backends.budget_terms import DiagonalTerm, KroneckerTerm, budget_term
from mooring.backends.eager import apply_penalty, apply_pull, has_compiler, pull_is_due, update_importance
from mooring.curvature.kronecker_factors import FACTOR_SLOTS, KroneckerFactors
from mooring.diagnose.stability import interpolation_weight, tallies
from mooring.errors import MooringError
from mooring.rules import Budget, GradientPull, ParameterPull, State, merges
from mooring.rules.budget import budget_solved
from mooring.rules.pull import per_run
from mooring.state.consolidation import consolidate, layer_scales
from mooring.state.memory import Memory
from mooring.state.parameter_state import ParameterState
from mooring.state.selection import layer_of
from mooring_lab.fleet.fleet_optimizer import FleetOptimizer
from mooring_lab.fleet.gpu.run_kernel import apply_budget_pull, total_spent
from mooring_lab.fleet.learner_plugin import PluginState
from mooring_lab.fleet.stack.stack import flatten_per_run, to_stack_layout
from mooring_lab.model.method import Method
from mooring_lab.model.results import Stability

Tensors = dict[str, Tensor]


@runtime_checkable
class LayerForce(Protocol):
    """A pull that also has a force on parameters whose curvature has Kronecker factors."""

    def layer_force(self, factors: KroneckerFactors, d: Tensor, lr: Tensor) -> Tensor:
        """Return the force at a displacement from the anchor, of shape (runs, out, ...)."""


class MethodState:
    """Importance and pull of neighbouring runs of a stack that share a method.

    The order within an iteration is that of `mooring.step.TrainingStep`, and so are the rules.

    Args:
        method: the method.
        seeds: of each run.
        lr: of each run, of shape (runs,).
        strength: of each run, of shape (runs,); ignored if the method has none.
        names: the parameters to moor.
        with_factors: those of them whose curvature has Kronecker factors, with the number of their groups.

    Attributes:
        states: the state of each parameter, by name; its tensors have a leading run axis.
        mu: the multiplier of each run's budget.
        scale: the factor of what each run may spend, float64 of shape (runs,); None if nothing is measured.
        acts: whether a budget's pull acts; it does not where distillation holds all past tasks.
        outputs: the number of outputs of a head that are in use; None for all.
    """

    def __init__(
        self,
        method: Method,
        seeds: Sequence[int],
        lr: Tensor,
        strength: Tensor,
        names: list[str],
        with_factors: Mapping[str, int] | None = None,
    ) -> None:
        assert method.importance is not None
        self.method = method
        self.importances = [method.importance(seed) for seed in seeds]
        self.importance = self.importances[0]
        self.importance_keys = [repr(importance) for importance in self.importances]  # equal for most runs
        self.lr, self.strength, self.names, self.with_factors = lr, strength, names, with_factors or {}
        self.pull = method.pull(strength)
        if self.with_factors and isinstance(self.pull, GradientPull) and not isinstance(self.pull, LayerForce):
            raise MooringError(
                f"{type(self.pull).__name__} of {method.name} cannot hold layers by Kronecker factors: give a Budget, "
                "or a pull with a method layer_force, as laplace-kronecker has it"
            )
        self.states: dict[str, ParameterState] = {}
        self.mu = torch.zeros(len(lr), dtype=torch.float64, device=lr.device)
        self.scale: Tensor | None = None
        self.acts = True
        self.outputs: int | None = None
        self.tasks = self.steps = 0

    @torch.no_grad()
    def bind(self, parameters: Tensors, gradients: Collection[str]) -> None:
        """Point every state at the live parameter, and create the states of parameters with a first gradient."""
        for name, state in self.states.items():
            state.parameter = parameters[name]
        for name in gradients:
            if name in self.names and name not in self.states:
                self.states[name] = self._new_state(name, parameters[name])

    def penalized_gradients(self, gradients: Tensors) -> Tensors:
        """Return g + force for the parameters that have a gradient and a past; empty without a penalty."""
        if not isinstance(self.pull, GradientPull):
            return {}
        penalized = {
            name: apply_penalty(self.pull, {**state.pull_tensors(), "g": gradients[name], "lr": self.lr})
            for name, state in self.states.items()
            if name in gradients and state.previous is not None
        }
        return penalized | {name: gradients[name] + force for name, force in self.layer_forces(gradients).items()}

    @torch.no_grad()
    def layer_forces(self, names: Collection[str]) -> Tensors:
        """Return the penalty's force on those of these parameters whose past has Kronecker factors."""
        if not isinstance(self.pull, LayerForce):
            return {}
        held = {name: s for name, s in self.states.items() if name in names and s.factors and s.factors.tasks}
        return {
            name: self.pull.layer_force(state.factors, state.theta - state.anchor, self.lr).to(state.theta.dtype)
            for name, state in held.items()
            if state.factors
        }

    def copy_parameters(self) -> Tensors:
        """Return the parameters before the optimizer's step, if the importance needs them."""
        return {name: s.theta.clone() for name, s in self.states.items()} if self.importance.needs_step else {}

    @torch.no_grad()
    def after_step(self, gradients: Tensors, before: Tensors, probes: Tensors, samples: int) -> None:
        """Update the importance, then pull.

        Args:
            gradients: of the task's loss alone.
            before: the result of `copy_parameters`.
            probes: the gradients of the importance's own function of the outputs, if it has one.
            samples: in the batch.
        """
        self.steps += 1
        self.update_importance(gradients, before, probes, samples)
        if pull_is_due(self.pull, self.tasks, self.steps):
            self.pull_parameters(gradients)

    def pull_parameters(self, names: Collection[str]) -> None:
        """Pull these parameters if the pull acts on parameters and there is a past."""
        if self.tasks and not isinstance(self.pull, GradientPull):
            self.apply_pull([name for name in self.states if name in names])

    @property
    def scores_late(self) -> bool:
        """Whether a plugin updates the importance and pulls, after the optimizer's step of all runs."""
        return self.method.plugin is not None and self.method.plugin.scores_late

    @torch.no_grad()
    def start_epoch(self, parameters: Tensors) -> None:
        """Start another epoch of a task."""
        self.bind(parameters, ())
        for state in self.states.values():
            self.importance.start_epoch(state.importance_state, state.theta - state.anchor)

    @torch.no_grad()
    def restart_importance(self) -> None:
        """Discard what was accumulated in this task."""
        for state in self.states.values():
            state.importance_state, state.count = self._start_importance(state, self.tasks), 0

    @torch.no_grad()
    def update_importance(
        self, gradients: Tensors, before: Tensors, probes: Tensors, samples: int, *, counts: bool = True
    ) -> None:
        """Add the importance of one batch, and count it; the other arguments are those of `after_step`."""
        for name, state in self.states.items():
            if name not in gradients:
                continue
            if self.importance.watches == "outputs" and name not in probes:
                continue  # the outputs do not depend on it
            state.count += counts
            if not state.factors:  # a parameter with factors has no scores
                tensors: dict[str, Any] = {**state.pull_tensors(), "g": gradients[name], "lr": self.lr}
                tensors |= {f"state_{slot}": tensor for slot, tensor in state.importance_state.items()}
                tensors |= {key: own[name] for key, own in (("before", before), ("probe", probes)) if name in own}
                update_importance(self.importance, {**tensors, "samples": samples, "count": state.count})

    @torch.no_grad()
    def apply_pull(self, names: Collection[str]) -> None:
        """Pull these parameters; a budget counts what the others have spent."""
        if isinstance(self.pull, Budget):
            self._apply_budget(self.pull, names)
            return
        assert isinstance(self.pull, ParameterPull)
        scales = layer_scales(self.states.values(), self.importance)
        for name in names:
            if (state := self.states.get(name)) is None:
                continue
            tensors: dict[str, Any] = {**state.pull_tensors(), "lr": self.lr}
            tensors["state_current"] = state.importance_state["current"]
            if scales:
                tensors["layer_scale"] = scales[layer_of(name)]
            apply_pull(self.pull, tensors)

    def _apply_budget(self, budget: Budget, names: Collection[str]) -> None:
        """Keep every run within its budget."""
        if not self.acts:
            return
        terms = {name: term for name, state in self.states.items() if (term := budget_term(state)) is not None}
        moved = [term for name, term in terms.items() if name in names]
        fixed = [term for name, term in terms.items() if name not in names]
        if not moved:
            return
        allowed: Tensor | float = budget.allowed(self.tasks)
        if self.scale is not None:
            allowed = self.scale * allowed
        if fixed:
            allowed = (allowed - self._unpulled(fixed)).clamp(min=0)
        mu = budget_solved(lambda mu, done: _total_spent(moved, mu, done), allowed, self.mu)
        self.mu.copy_(mu)
        for term in moved:
            if has_compiler(self.mu.device) and not isinstance(term, KroneckerTerm):
                apply_budget_pull(_flat_tensors(term), self.mu)
            else:
                term.apply_pull(budget, self.mu)

    @torch.no_grad()
    def spent(self) -> Tensor:
        """Return what each run has spent by the estimate of its budget, float64 of shape (runs,)."""
        terms = [term for state in self.states.values() if (term := budget_term(state)) is not None]
        return self._unpulled(terms) if terms else torch.zeros_like(self.mu)

    def _unpulled(self, terms: Sequence[DiagonalTerm]) -> Tensor:
        """Return what these parameters spend without a pull."""
        zero = torch.zeros_like(self.mu)
        return _total_spent(terms, zero, zero.bool())[0]

    @torch.no_grad()
    def consolidate(self, parameters: Tensors) -> None:
        """End a task, as `mooring.state.consolidation.consolidate` says; outputs that come later stay free."""
        self.bind(parameters, self.names)
        if isinstance(self.pull, ParameterPull) and self.pull.every == "task" and self.tasks:
            self.apply_pull([name for name, state in self.states.items() if state.count])
        merge = merges.resolve(self.method.merge)
        consolidate(self.states.values(), self.importance, merge, Memory(), self._start_importance, self.tasks)
        for state in self.states.values():
            if state.outputs is not None and state.previous is not None:
                previous = state.full(state.previous).clone()
                previous[:, state.outputs :] = 0
                state.previous = to_stack_layout(previous)
        self.tasks += 1
        self.steps = 0

    def set_outputs(self, outputs: int) -> None:
        """Say how many outputs of a head are in use from here on."""
        self.outputs = outputs
        for state in self.states.values():
            state.outputs = self._outputs_in_use(state)

    def _outputs_in_use(self, state: ParameterState) -> int | None:
        """Return how many outputs a parameter of a growing head has so far; None for all, and for other parameters."""
        grows = state.name.startswith("heads.") and self.outputs is not None
        return self.outputs if grows and self.outputs < state.anchor.shape[1] else None  # type: ignore[operator]

    def _new_state(self, name: str, theta: Tensor) -> ParameterState:
        """Return the state of a parameter that starts here."""
        state = ParameterState(name, theta, theta.detach().clone(), {}, runs=True)
        if name in self.with_factors:
            no_score = torch.zeros(len(theta), *(1,) * (theta.ndim - 1), dtype=theta.dtype, device=theta.device)
            state.importance_state = {"current": no_score}
            state.factors = KroneckerFactors.zeros(state.anchor, theta.dtype, runs=True, groups=self.with_factors[name])
        else:
            state.importance_state = self._start_importance(state, self.tasks)
        state.outputs = self._outputs_in_use(state)
        return state

    def _start_importance(self, state: ParameterState, task: int) -> State:
        """Return the importance's tensors at the start of a task, drawn by each run's own seed if at random."""
        started: dict[str, State] = {}
        for key, importance in zip(self.importance_keys, self.importances, strict=True):
            if key not in started:  # a start depends on nothing else
                started[key] = importance.start(state.anchor[0], name=state.name, task=task)
        runs = [started[key] for key in self.importance_keys]
        stacked = {slot: torch.stack([run[slot] for run in runs]) for slot in runs[0]}
        ones = (1,) * (state.anchor.ndim - 1)  # a single number for a whole parameter stays one for each run
        return {slot: t.reshape(-1, *ones) if t.ndim == 1 else to_stack_layout(t) for slot, t in stacked.items()}

    def select_runs(self, rows: Tensor) -> None:
        """Keep the runs in these rows, in this order."""
        self.importances = [self.importances[row] for row in rows.tolist()]
        self.importance_keys = [self.importance_keys[row] for row in rows.tolist()]
        self.mu = self.mu[rows]
        self.scale = None if self.scale is None else self.scale[rows]
        self.set_strength(self.strength[rows])
        for state in self.states.values():
            state.select_runs(rows, to_stack_layout)

    def set_strength(self, strength: Tensor) -> None:
        """Set the strength of each run, of shape (runs,)."""
        self.strength = strength
        self.pull = self.method.pull(strength)

    # In checkpoints

    def state_dict(self) -> PluginState:
        """Return what the runs keep."""
        tensors = {"mu": self.mu} | ({} if self.scale is None else {"scale": self.scale})
        for name, state in self.states.items():
            tensors |= {f"{name}/{slot}": tensor for slot, tensor in state.slots().items()}
        counts = {name: state.count for name, state in self.states.items()}
        factors = {name: [s.factors.count, s.factors.tasks] for name, s in self.states.items() if s.factors}
        return PluginState(tensors, {"tasks": self.tasks, "steps": self.steps, "counts": counts, "factors": factors})

    def load_state_dict(self, parameters: Tensors, state: PluginState) -> None:
        """Continue from what `state_dict` returned, with the parameters of these runs."""
        values, device = state.values, self.mu.device
        self.tasks, self.steps = values["tasks"], values["steps"]
        self.mu = state.tensors["mu"].to(device)
        self.scale = None if self.scale is None else state.tensors["scale"].to(device)
        for name, count in values["counts"].items():
            slots = {slot: to_stack_layout(tensor) for slot, tensor in state.below(name, device).items()}
            anchor, previous = slots.pop("anchor"), slots.pop("previous", None)
            factors = None
            if counts := values["factors"].get(name):
                inputs, outputs, past_inputs, past_outputs = (slots.pop(slot) for slot in FACTOR_SLOTS)
                observed, tasks = counts
                factors = KroneckerFactors(inputs, outputs, past_inputs, past_outputs, observed, tasks, runs=True)
                factors.update_eigenbasis()
            theta = parameters[name]
            self.states[name] = ParameterState(name, theta, anchor, slots, previous, count, factors, runs=True)

    # Metrics of the results

    def importance_by_layer(self) -> list[dict[str, float]]:
        """Return the mean importance over past tasks of each layer, for each run."""
        known = {name: state for name, state in self.states.items() if state.previous is not None}
        if not known:
            return [{} for _ in self.importances]
        sums = torch.stack([_scores(state).sum(1, dtype=torch.float64) for state in known.values()], 1).tolist()
        sizes: Counter[str] = Counter()
        for name, state in known.items():
            sizes[layer_of(name)] += state.size
        means = []
        for run_sums in sums:
            totals = dict.fromkeys(sizes, 0.0)
            for name, total in zip(known, run_sums, strict=True):
                totals[layer_of(name)] += total
            means.append({layer: totals[layer] / size for layer, size in sizes.items()})
        return means

    def stability(self, optimizer: FleetOptimizer, rows: slice) -> list[Stability | None]:
        """Return what the penalty of each run will do, at the base learning rate; None without a penalty or a past.

        An optimizer that rescales learning rates says nothing of parameters with Kronecker factors, whose directions
        are those of no weight.

        Args:
            optimizer: of the whole stack, after a task.
            rows: the runs, as rows of the whole stack.
        """
        rescalings = {name: optimizer.rescaling(name) for name, state in self.states.items() if state.has_previous}
        known = [self.states[name] for name, r in rescalings.items() if r is None or not self.states[name].factors]
        if not isinstance(self.pull, GradientPull) or not known:
            return [None] * len(self.mu)
        limits, lr = optimizer.divergence_limits()[rows], optimizer.base[rows].to(self.lr.dtype)
        lr_strength = (lr.double() * self.strength.double()).to(lr.dtype)
        counts = torch.zeros(len(self.lr), 5, dtype=torch.int64, device=self.lr.device)
        largest, largest_per_strength = [], []
        for state in known:
            scores = _scores(state)
            if (rescaling := rescalings[state.name]) is not None:
                scores = scores * rescaling[rows].reshape(len(scores), -1)
            p = interpolation_weight(lr_strength, 1.0, scores)
            counts += tallies(p, limits)
            largest.append(p.amax(1))
            largest_per_strength.append((per_run(lr, scores) * scores).amax(1))
        columns = (torch.stack(maxima).amax(0).tolist() for maxima in (largest, largest_per_strength))
        return [
            Stability(self.tasks, p, 1 / per_strength if per_strength > 0 else float("inf"), *run_counts)
            for p, per_strength, run_counts in zip(*columns, counts.tolist(), strict=True)
        ]


def _total_spent(terms: Sequence[DiagonalTerm], mu: Tensor, done: Tensor) -> Tensor:
    """Return what all parameters of each run spend at mu, (2, runs); anything for runs that are done."""
    if has_compiler(mu.device):
        return total_spent([_flat_tensors(term) for term in terms], mu, done)
    return torch.stack([term.spent(mu) for term in terms]).sum(0)


def _flat_tensors(term: DiagonalTerm) -> Tensors:
    return {name: flatten_per_run(tensor) for name, tensor in term.tensors().items()}


def _scores(state: ParameterState) -> Tensor:
    """Return the importance over past tasks of each weight, or of each direction of its eigenbasis; (runs, weights)."""
    if state.factors and state.factors.basis is not None:
        return state.factors.basis[2].flatten(1)
    return state.full(state.previous).reshape(len(state.anchor), -1)


def rows_of(tensors: Tensors, rows: slice) -> Tensors:
    """Return some runs of each tensor, as views.

    Example:
        >>> rows_of({"weight": torch.zeros(4, 2)}, slice(1, 3))["weight"].shape
        torch.Size([2, 2])
    """
    return {name: tensor.detach()[rows] for name, tensor in tensors.items()}
