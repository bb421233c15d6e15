"""The runs of a fleet by method: neighbours in the stack, each group with its own importance and pull."""

from collections.abc import Mapping, Sequence
from itertools import groupby

import torch
from torch import Tensor

from mooring.curvature.kronecker_factors import LayerFactors
from mooring_lab.fleet.fleet_optimizer import FleetOptimizer
from mooring_lab.fleet.method_state import MethodState, Tensors
from mooring_lab.fleet.record import RunRecord
from mooring_lab.methods import find_method
from mooring_lab.model.order import seeded_generator
from mooring_lab.model.spec import RunSpec


class MethodGroups:
    """The rows of a stack that belong to each method.

    Args:
        specs: the runs, those of a method next to each other.
        names: the parameters to moor.
        lr: of each run, of shape (runs,).
        with_factors: the parameters whose curvature has Kronecker factors, if a method keeps those, with the number of
            their groups.

    Attributes:
        names: the parameters to moor.
        groups: the rows of each method, with its state if it moors.

    Example:
        >>> specs = [RunSpec("digits", "0", method, seed) for method in ("plain", "explicit-ewc") for seed in (0, 1)]
        >>> [rows for rows, _ in MethodGroups(specs, [], torch.ones(4)).moored]
        [slice(2, 4, None)]
    """

    def __init__(
        self, specs: Sequence[RunSpec], names: list[str], lr: Tensor, with_factors: Mapping[str, int] | None = None
    ) -> None:
        self.names, self.groups = frozenset(names), list[tuple[slice, MethodState | None]]()
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

    @property
    def moored(self) -> list[tuple[slice, MethodState]]:
        """The groups whose method moors."""
        return [(rows, state) for rows, state in self.groups if state is not None]

    def set_outputs(self, outputs: int) -> None:
        """Say how many outputs of a head are in use from here on; a growing head has more later."""
        for _, state in self.moored:
            state.set_outputs(outputs)

    def consolidate(self, parameters: Tensors, anchors: str = "last") -> None:
        """End a task of the methods anchored at the "last" task, or begin those anchored at the "start" of training."""
        for rows, state in self.moored:
            if state.method.anchors == anchors:
                state.consolidate(rows_of(parameters, rows))

    def probe(self, logits: Tensor, seeds: Sequence[int], step: int) -> Tensor:
        """Return the sum of the importances' functions of the outputs; the gradients of runs do not mix.

        Args:
            logits: of the whole stack, of shape (runs, batch, outputs).
            seeds: of the runs.
            step: the iteration, for importances that draw random numbers.
        """
        total = logits.new_zeros(())
        for rows, state in self.moored:
            if not state.importance.draws:  # a sum over the samples of all runs
                total = total + state.importance.probe(logits[rows].flatten(0, 1), torch.Generator())
                continue
            for outputs, seed, importance in zip(logits[rows], seeds[rows], state.importances, strict=True):
                run_seed = seeded_generator(seed, "probe", step).initial_seed()
                total = total + importance.probe(outputs, torch.Generator(logits.device).manual_seed(run_seed))
        return total

    @torch.no_grad()
    def accumulate_factors(self, observed: Mapping[str, LayerFactors], finite: Tensor | None) -> None:
        """Add the Kronecker factors of one iteration to the methods; all of a fleet keep them, or none.

        Args:
            observed: the factors of every layer.
            finite: which of the observed runs are still there; None for all.
        """
        if finite is not None:
            observed = {layer: (a[finite], g[finite], sums[finite]) for layer, (a, g, sums) in observed.items()}
        for rows, state in self.moored:
            for layer, factors in observed.items():
                inputs, outputs, bias_outputs = (factor[rows] for factor in factors)
                for name, added in ((f"{layer}.weight", (inputs, outputs)), (f"{layer}.bias", (None, bias_outputs))):
                    if (parameter := state.states.get(name)) and parameter.factors:
                        parameter.factors.accumulate(*added)

    def count_factors(self) -> None:
        """Count an iteration in which layers were observed."""
        for parameter in (parameter for _, state in self.moored for parameter in state.states.values()):
            if parameter.factors:
                parameter.factors.count += 1

    @torch.no_grad()
    def penalized_gradients(self, parameters: Tensors, gradients: Tensors) -> Tensors:
        """Return the gradients that the optimizer gets: the task's, with penalties on the rows that have one."""
        penalized = dict(gradients)
        for rows, state in self.moored:
            state.bind(rows_of(parameters, rows), gradients)
            for name, gradient in state.penalized_gradients(rows_of(gradients, rows)).items():
                if penalized[name] is gradients[name]:
                    penalized[name] = gradients[name].clone()
                penalized[name][rows] = gradient
        return penalized

    @torch.no_grad()
    def step(
        self,
        parameters: Tensors,
        gradients: Tensors,
        penalized: Tensors,
        probes: Tensors,
        samples: int,
        optimizer: FleetOptimizer,
    ) -> None:
        """Take the optimizer's step, then update the importance of each group and pull it.

        Args:
            parameters: of the whole stack; changed in place.
            gradients: of the task's loss alone.
            penalized: the result of `penalized_gradients`.
            probes: the gradients of the importances' own functions of the outputs.
            samples: in the batch.
            optimizer: of the whole stack.
        """
        for rows, state in self.moored:
            state.bind(rows_of(parameters, rows), ())
        before = [state.copy_parameters() for _, state in self.moored]
        optimizer.step(parameters, penalized)
        for (rows, state), copies in zip(self.moored, before, strict=True):
            state.after_step(rows_of(gradients, rows), copies, rows_of(probes, rows), samples)

    def select_runs(self, rows: Tensor) -> list[int]:
        """Keep the runs in these rows, moved up, those of a method next to each other.

        Args:
            rows: int64 on the CPU; a row may occur several times.

        Returns:
            The numbers, until now, of the groups that remain.
        """
        remaining: dict[int, tuple[slice, MethodState | None]] = {}
        begin = 0
        for number, (span, state) in enumerate(self.groups):
            own_rows = rows[(rows >= span.start) & (rows < span.stop)] - span.start
            if len(own_rows):
                if state is not None:
                    state.select_runs(own_rows.to(state.lr.device))
                remaining[number] = (slice(begin, begin + len(own_rows)), state)
                begin += len(own_rows)
        self.groups = list(remaining.values())
        return list(remaining)

    def set_learning_rates(self, lr: Tensor) -> None:
        """Let each method read the learning rates of its runs, as views of shape (runs,)."""
        for rows, state in self.moored:
            state.lr = lr[rows]

    def set_strengths(self, specs: Sequence[RunSpec]) -> None:
        """Give each run the strength of its spec."""
        for rows, state in self.moored:
            state.set_strength(_strengths(specs[rows], state.lr))

    # Metrics of the results

    def record_stability(self, records: Sequence[RunRecord], optimizer: FleetOptimizer) -> Tensor:
        """Record what each penalty will do from here on.

        Args:
            records: of the runs.
            optimizer: of the runs.

        Returns:
            For each run, whether its penalty extrapolates somewhere; bool of shape (runs,).
        """
        extrapolates = torch.zeros(len(records), dtype=torch.bool)
        for rows, state in self.moored:
            verdicts = state.stability(optimizer, rows)
            for run, (record, verdict) in enumerate(zip(records[rows], verdicts, strict=True), rows.start):
                if verdict:
                    record.stability.append(verdict)
                    extrapolates[run] = bool(verdict.warning) and state.method.can_extrapolate
        return extrapolates

    def importance_by_layer(self) -> list[dict[str, float]]:
        """Return the mean importance over past tasks of each layer, for each run; empty if nothing is moored."""
        means: list[dict[str, float]] = []
        for rows, state in self.groups:
            means += [{}] * (rows.stop - rows.start) if state is None else state.importance_by_layer()
        return means


def _strengths(specs: Sequence[RunSpec], like: Tensor) -> Tensor:
    return like.new_tensor([spec.strength or 0.0 for spec in specs])


def rows_of(tensors: Tensors, rows: slice) -> Tensors:
    """Return some runs of each tensor, as views.

    Example:
        >>> rows_of({"weight": torch.zeros(4, 2)}, slice(1, 3))["weight"].shape
        torch.Size([2, 2])
    """
    return {name: tensor.detach()[rows] for name, tensor in tensors.items()}
