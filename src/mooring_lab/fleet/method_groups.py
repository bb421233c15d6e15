"""The runs of a fleet by method: neighbours in the stack, each group with its own importance and pull."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mooring.backends.eager import has_compiler
from mooring_lab.fleet.fleet_optimizer import FleetOptimizer
from mooring_lab.fleet.fused_step import FusedStep, run_fused_steps
from mooring_lab.fleet.learner_plugin import EpochPlan, LearnerPlugin, PluginState, Step
from mooring_lab.fleet.measurements import finite_runs
from mooring_lab.fleet.method_state import MethodState, Tensors, rows_of
from mooring_lab.fleet.stack.stack_observer import StackObserver
from mooring_lab.model.known_methods import find_method
from mooring_lab.model.order import seeded_generator
from mooring_lab.model.spec import RunSpec

if TYPE_CHECKING:
    from mooring_lab.fleet.fleet import Fleet


class MethodGroups(LearnerPlugin):
    """The importance and the pull of every method, around the optimizer's step; eager, or as fused kernels on a GPU.

    Args:
        specs: the runs, those of a method next to each other.
        names: the parameters to moor.
        optimizer: of the whole stack.
        observer: of the layers, if the methods keep the curvature of layers; all of a fleet do, or none.

    Attributes:
        names: the parameters to moor.
        groups: the rows of each method, with its state if it moors.
        fused: the kernels of each group; empty without a compiler.

    Example:
        >>> from mooring_lab.fleet.sgd import SGD
        >>> specs = [RunSpec("digits", "0", method, seed) for method in ("plain", "explicit-ewc") for seed in (0, 1)]
        >>> [rows for rows, _ in MethodGroups(specs, [], SGD(torch.ones(4))).moored]
        [slice(2, 4, None)]
    """

    key = "rules"

    def __init__(
        self,
        specs: Sequence[RunSpec],
        names: list[str],
        optimizer: FleetOptimizer,
        observer: StackObserver | None = None,
    ) -> None:
        self.names, self.groups = frozenset(names), list[tuple[slice, MethodState | None]]()
        self.optimizer, self.observer, lr = optimizer, observer, optimizer.lr
        with_factors = observer.parameters if observer else None
        begin = 0
        for name, members in groupby(specs, key=lambda spec: find_method(spec.method).name):
            runs, method = list(members), find_method(name)
            rows = slice(begin, begin + len(runs))
            begin = rows.stop
            state = None
            if method.importance is not None:
                seeds, strength = [spec.seed for spec in runs], _strengths(runs, lr)
                state = MethodState(method, seeds, lr[rows], strength, names, with_factors)
            self.groups.append((rows, state))
        self.fused = [FusedStep(state, optimizer) for _, state in self.groups if has_compiler(lr.device)]
        self.compiled = False
        watches = [state.importance for _, state in self.moored if state.importance.watches == "outputs"]
        self.probes, self.draws = bool(watches), any(importance.draws for importance in watches)

    @property
    def moored(self) -> list[tuple[slice, MethodState]]:
        """The groups whose method moors."""
        return [(rows, state) for rows, state in self.groups if state is not None]

    # Tasks and epochs

    def plan_epoch(self, fleet: Fleet, plan: EpochPlan) -> None:
        """Start another epoch of a task, for importances that read the movement within one."""
        for rows, state in self.moored if plan.epoch and not fleet.position.step else ():
            state.start_epoch(rows_of(fleet.stack.parameters, rows))

    def start_training(self, fleet: Fleet) -> None:
        """Anchor the methods that hold on to the start of training."""
        self._consolidate(fleet, "start")

    def start_task(self, fleet: Fleet, task: int) -> None:
        """Say how many outputs of a head are in use, and start the device's counters from the host's."""
        for _, state in self.moored:
            state.set_outputs(fleet.passes.outputs)
        for fused in self.fused:
            fused.counts = {}
        self.compiled = False

    def end_task(self, fleet: Fleet, task: int) -> None:
        """Anchor the methods that hold on to the last task."""
        self._consolidate(fleet, "last")

    def _consolidate(self, fleet: Fleet, anchors: str) -> None:
        for rows, state in self.moored:
            if state.method.anchors == anchors:
                state.consolidate(rows_of(fleet.stack.parameters, rows))

    # Steps

    def start_step(self, fleet: Fleet, number: int) -> tuple[Hashable, ...]:
        """Say whether layers are observed, and which methods pull."""
        observes = self.observer is not None and self.observer.start_step(number)
        return (observes, *(fused.pulls for fused in self.fused))

    def finish_step(self, fleet: Fleet, number: int) -> None:
        """Count the step, and the observation of layers."""
        if self.observer is not None and self.observer.enabled:
            for parameter in (parameter for _, state in self.moored for parameter in state.states.values()):
                if parameter.factors:
                    parameter.factors.count += 1
        for fused in self.fused:
            fused.count_step()

    @contextmanager
    def unobserved(self) -> Iterator[None]:
        """Observe no layer in passes of this context."""
        observes = self.observer is not None and self.observer.enabled
        if self.observer is not None:
            self.observer.enabled = False
        yield
        if self.observer is not None:
            self.observer.enabled = observes

    def probe(self, fleet: Fleet, logits: Tensor) -> Tensor | None:
        """Return the sum of the importances' functions of the outputs; the gradients of runs do not mix.

        Args:
            fleet: of the runs; importances that draw random numbers take them by seed and step.
            logits: of the whole stack, of shape (runs, batch, outputs).
        """
        if not self.probes:
            return None
        total = logits.new_zeros(())
        for rows, state in self.moored:
            if not state.importance.draws:  # a sum over the samples of all runs
                total = total + state.importance.probe(logits[rows].flatten(0, 1), torch.Generator())
                continue
            seeds = fleet.stack.seeds[rows]
            for outputs, seed, importance in zip(logits[rows], seeds, state.importances, strict=True):
                run_seed = seeded_generator(seed, "probe", fleet.steps).initial_seed()
                total = total + importance.probe(outputs, torch.Generator(logits.device).manual_seed(run_seed))
        return total

    @torch.no_grad()
    def after_step(self, fleet: Fleet, step: Step) -> None:
        """Add the Kronecker factors of one iteration to the methods."""
        if self.observer is None or not self.observer.enabled:
            return
        observed = self.observer.take()
        for rows, state in self.moored:
            for layer, factors in observed.items():
                inputs, outputs, bias_outputs = (factor[rows] for factor in factors)
                for name, added in ((f"{layer}.weight", (inputs, outputs)), (f"{layer}.bias", (None, bias_outputs))):
                    if (parameter := state.states.get(name)) and parameter.factors:
                        parameter.factors.accumulate(*added)

    @torch.no_grad()
    def take_step(self, fleet: Fleet, step: Step) -> None:
        """Apply penalties, take the optimizer's step, then update importances and pull: Algorithm 1.

        Eagerly, runs whose gradients are not finite leave the fleet before the step. Kernels note them instead.
        """
        parameters, samples = fleet.stack.parameters, step.indices.shape[1]
        if self.fused:
            pairs = [(fused, rows) for fused, (rows, _) in zip(self.fused, self.groups, strict=True)]
            args = parameters, step.gradients, step.probes, step.added, samples, fleet.first_bad, fleet.now
            run_fused_steps(pairs, *args, new=not self.compiled)
            self.compiled = True
            return
        penalized = self.penalized(parameters, step.gradients)
        penalized |= {name: penalized[name] + g for name, g in step.added.items()}
        finite = finite_runs([*penalized.values(), *step.probes.values()])
        if not bool(finite.all()):
            fleet.stop(~finite)
            step.select(finite)
            penalized = {name: tensor[finite] for name, tensor in penalized.items()}
            parameters = fleet.stack.parameters
        for rows, state in self.moored:
            state.bind(rows_of(parameters, rows), ())
        before = [state.copy_parameters() for _, state in self.moored]
        self.optimizer.step(parameters, penalized)
        for (rows, state), copies in zip(self.moored, before, strict=True):
            if not state.scores_late:
                g = penalized if state.method.penalized_scores else step.gradients
                state.after_step(rows_of(g, rows), copies, rows_of(step.probes, rows), samples)

    @torch.no_grad()
    def score_late(self, step: Step, probes: Tensors) -> None:
        """Update the importances that wait for the optimizer's step of all runs, and pull.

        Args:
            step: with the penalized gradients.
            probes: the gradients of the plugin's own function of the outputs.
        """
        samples = step.indices.shape[1]
        for rows, state in self.moored:
            g, own_probes = rows_of(step.penalized, rows), rows_of(probes, rows)
            if self.fused:  # which counts on the host
                state.update_importance(g, {}, own_probes, samples, counts=False)
                state.pull_parameters(g)
            else:
                state.after_step(g, {}, own_probes, samples)

    def penalized(self, parameters: Tensors, gradients: Tensors) -> Tensors:
        """Return the task's gradients, with those of penalties on the rows that have one."""
        penalized = dict(gradients)
        for rows, state in self.moored:
            state.bind(rows_of(parameters, rows), gradients)
            for name, gradient in state.penalized_gradients(rows_of(gradients, rows)).items():
                if penalized[name] is gradients[name]:
                    penalized[name] = gradients[name].clone()
                penalized[name][rows] = gradient
        return penalized

    # Which runs are in the fleet, and checkpoints

    def keep(self, rows: Tensor) -> None:
        """Keep the runs in these rows, moved up, those of a method next to each other; after the optimizer."""
        rows, lr = rows.cpu(), self.optimizer.lr
        remaining: dict[int, tuple[slice, MethodState | None]] = {}
        begin = 0
        for number, (span, state) in enumerate(self.groups):
            own_rows = rows[(rows >= span.start) & (rows < span.stop)] - span.start
            if len(own_rows):
                kept = slice(begin, begin + len(own_rows))
                if state is not None:
                    state.select_runs(own_rows.to(lr.device))
                    state.lr = lr[kept]
                remaining[number] = (kept, state)
                begin = kept.stop
        self.groups = list(remaining.values())
        self.fused = [self.fused[number] for number in remaining if self.fused]
        if self.observer is not None:
            self.observer.keep(rows)

    def set_strengths(self, specs: Sequence[RunSpec]) -> None:
        """Give each run the strength of its spec."""
        for rows, state in self.moored:
            state.set_strength(_strengths(specs[rows], state.lr))

    def state_dict(self) -> PluginState:
        """Return what each method keeps."""
        return PluginState(groups=[PluginState() if s is None else s.state_dict() for _, s in self.groups])

    def load_state_dict(self, fleet: Fleet, state: PluginState) -> None:
        """Continue from that."""
        for (rows, own), saved in zip(self.groups, state.groups, strict=True):
            if own is not None:
                own.load_state_dict(rows_of(fleet.stack.parameters, rows), saved)

    # Metrics of the results

    def judge(self, fleet: Fleet) -> list[str]:
        """Record what each penalty will do from here on, and return the warning of each that extrapolates."""
        warnings = [""] * len(fleet.measured.records)
        for rows, state in self.moored:
            verdicts = state.stability(self.optimizer, rows)
            for run, verdict in enumerate(verdicts, rows.start):
                if verdict:
                    fleet.measured.records[run].stability.append(verdict)
                    warnings[run] = verdict.warning if state.method.can_extrapolate else ""
        return warnings

    def metrics(self, fleet: Fleet) -> list[dict[str, Any]]:
        """Return the mean importance over past tasks of each layer, for each run; empty if nothing is moored."""
        means: list[dict[str, float]] = []
        for rows, state in self.groups:
            means += [{}] * (rows.stop - rows.start) if state is None else state.importance_by_layer()
        return [{"importance": layers} for layers in means]


def _strengths(specs: Sequence[RunSpec], like: Tensor) -> Tensor:
    return like.new_tensor([spec.strength or 0.0 for spec in specs])
