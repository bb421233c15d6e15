"""The measured budgets of the runs of a fleet: what the core's controller reads of them and changes."""

import math
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from mooring.errors import UnheldWarning, warn
from mooring.hold.control import BudgetController
from mooring.hold.repair import Sides
from mooring.rules import Budget
from mooring.state.parameter_state import ParameterState
from mooring_lab.fleet.method_state import MethodState, Tensors
from mooring_lab.fleet.stack.stack import Stack
from mooring_lab.methods.budgets.kept_samples import KeptSamples


class RunBudgets(BudgetController):
    """The gauge of each run, and the pulls of a method that is a budget.

    Args:
        gauge: the kept samples that are measured; each past task is a gauge of its own.
        state: of the method of all runs.
        stack: the runs.

    Attributes:
        make_sides: returns what a repair moves at the end of the present task; None where nothing is distilled.
    """

    def __init__(self, gauge: KeptSamples, state: MethodState, stack: Stack) -> None:
        super().__init__(len(stack))
        self.gauge, self.state, self.stack = gauge, state, stack
        self.make_sides: Callable[[], Sides] | None = None
        state.scale = torch.ones_like(state.mu)
        self._averaged: Tensors = {}

    @property
    def budget(self) -> Budget:
        """The budget, whose nats are one number per run."""
        assert isinstance(self.state.pull, Budget)
        return self.state.pull

    @property
    def task(self) -> int:
        """The number of tasks that are held."""
        return self.state.tasks

    @property
    def records(self) -> Collection[ParameterState]:
        """The states of the moored parameters."""
        return self.state.states.values()

    def batches_of_gauges(self) -> list[int]:
        """Return the number of measured batches of each past task."""
        return [len(ranges) for ranges in self.gauge.batches]

    @torch.no_grad()
    def measure_batch(self, index: int) -> Tensor:
        """Return the sums and counts of the samples of a batch, (2, runs, samples)."""
        entries = [entries for ranges in self.gauge.batches for entries in ranges][index]
        value = self.gauge.divergence(self.stack, torch.tensor(entries, device=self.gauge.indices.device)).double()
        return torch.stack([value, torch.ones_like(value)])

    def measure_runs(self) -> Tensor:
        """Return the measured values on all gauges, (1, runs)."""
        means = self.gauge.task_means(self.stack).nan_to_num(math.inf)
        return means.mean(1).cpu().unsqueeze(0)

    def get_scales(self) -> Tensor:
        """Return the factor of what the estimate of each run may spend."""
        assert self.state.scale is not None
        return self.state.scale.cpu().clone()

    def set_scales(self, scales: Tensor) -> None:
        """Set the factors in place, because recorded steps read this memory."""
        assert self.state.scale is not None
        self.state.scale.copy_(scales)

    def binding(self) -> Tensor:
        """Return whether the pull of each run acts in this step."""
        return (self.state.mu > 0) & self.state.acts

    def set_acts(self, acts: bool) -> None:
        """Set whether the budget's pull acts."""
        self.state.acts = acts

    def sides(self) -> Sides | None:
        """Return what a repair moves; None if nothing can be repaired."""
        return self.make_sides() if self.make_sides else None

    def energy(self) -> Tensor:
        """Return what each run has spent by the estimate."""
        return self.state.spent().cpu()

    def pull(self) -> None:
        """Apply the budgets' pull now."""
        self.state.apply_pull(list(self.state.states))

    def multipliers(self) -> Tensor:
        """Return the multipliers."""
        return self.state.mu.clone()

    def load_multipliers(self, multipliers: Tensor, runs: Tensor) -> None:
        """Continue from the multipliers of these runs."""
        self.state.mu.copy_(torch.where(runs.to(multipliers.device), multipliers, self.state.mu))

    def averaged_parameters(self) -> Collection[Tensor]:
        """Return the parameters that are trained, also the heads."""
        self._averaged = dict(self.stack.parameters)
        return self._averaged.values()

    def warn_of_return(self, runs: Tensor, before: Tensor, share: Tensor) -> None:
        """Say nothing: what was given up is in the results of the runs."""

    def warn_of_unkept(self, runs: Tensor, least: Tensor) -> None:
        """Warn of runs that exceed their budget even at the anchor."""
        warn(
            f"the budget of {int(runs.sum())} runs of {self.state.method.name} cannot be kept: at the anchor "
            "itself more is measured, because statistics of normalization layers have changed",
            UnheldWarning,
        )

    def keep(self, rows: Tensor) -> None:
        """Keep only the runs in these rows, after the stack."""
        self.settle()
        rows, self.runs = rows.cpu(), len(rows)
        self.latest, self.largest = self.latest[rows], self.largest[rows]
        if self.distillation:
            self.distillation.keep(rows)
        self.average.keep({p: self.stack.parameters[name] for name, p in self._averaged.items()}, rows)

    # In checkpoints

    def tensors(self) -> Tensors:
        """Return what is kept for each run, by name."""
        self.settle()
        distilled: Tensors = {}
        if self.distillation:
            distilled = {"weight": self.distillation.weight, "task_norm": self.distillation.task_norm}
        return {"latest": self.latest, **distilled, **self.average.tensors(self.stack.parameters)}

    def values(self) -> dict[str, Any]:
        """Return what is the same for all runs."""
        return {"samples": self.samples.tolist(), "average": self.average.updates(self.stack.parameters)}

    def load(self, tensors: Tensors, values: dict[str, Any]) -> None:
        """Continue from what `tensors` and `values` returned."""
        self.latest, self.samples = tensors["latest"].cpu(), torch.tensor(values["samples"], dtype=torch.float64)
        if self.distillation:
            self.distillation.weight, self.distillation.task_norm = tensors["weight"].cpu(), tensors["task_norm"]
        self.set_acts(not self.distils_all)
        self.average.load(values["average"], tensors, self.stack.parameters)
