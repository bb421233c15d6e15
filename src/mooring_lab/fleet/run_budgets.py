"""Measured budgets of the runs of a fleet: `mooring.hold.measured_budget.MeasuredBudget` with a run axis."""

import math
from functools import partial

import torch
from torch import Tensor

from mooring.errors import UnheldWarning, warn
from mooring.hold.controller import next_scale
from mooring.hold.distillation import next_weight
from mooring.hold.measured_budget import FAR, FAR_GAIN, GAIN
from mooring.reference.pass_cost import MEASURING_INTERVAL
from mooring.rules import Budget
from mooring_lab.fleet.budget_return import return_to_budget
from mooring_lab.fleet.kept_samples import KeptSamples
from mooring_lab.fleet.method_groups import MethodGroups
from mooring_lab.fleet.method_state import MethodState, rows_of
from mooring_lab.fleet.run_distillation import RunDistillation
from mooring_lab.fleet.stack.stack import Stack


class RunBudgets:
    """The gauge of each run, and the controller that makes what is measured meet the run's budget.

    Args:
        gauge: the kept samples that are measured; each past task is a gauge of its own.
        groups: the methods of the runs; the pull of each is a budget.
        distillation: its weights are adjusted too, if there is one.

    Attributes:
        latest: the last measured value of each batch in this task, float64 of shape (runs, batches); NaN before.
    """

    def __init__(self, gauge: KeptSamples, groups: MethodGroups, distillation: RunDistillation | None) -> None:
        self.gauge, self.groups, self.distillation = gauge, groups, distillation
        self.start_task()

    def start_task(self) -> None:
        """Forget the values of the task before."""
        self.latest = torch.full((len(self.gauge.indices), len(self.gauge.batches())), math.nan, dtype=torch.float64)

    @torch.no_grad()
    def after_step(self, stack: Stack, steps: int) -> None:
        """Measure the next batch if it is due, and adjust what each run may spend.

        Args:
            stack: the runs.
            steps: the number of steps taken in this task.
        """
        number, remainder = divmod(steps, MEASURING_INTERVAL)
        if remainder or not self.latest.shape[1]:
            return
        index = (number - 1) % self.latest.shape[1]
        batch = torch.tensor(self.gauge.batches()[index], device=self.gauge.indices.device)
        value = self.gauge.divergence(stack, batch).double().mean(1).nan_to_num(math.inf).cpu()
        for rows, state in self.groups.moored:
            self._adjust(rows, state, index, value[rows])

    def _adjust(self, rows: slice, state: MethodState, index: int, value: Tensor) -> None:
        """Adjust the runs of a method after a measurement of one batch, of shape (runs,)."""
        latest, named = self.latest[rows], _named(state)
        far = ~(value <= FAR * named)
        latest[far] = math.nan  # what was measured before says little by now
        latest[:, index] = value
        measured, gain = self._running(latest, state), GAIN / latest.shape[1]
        runs = list(zip(measured.tolist(), named.tolist(), (state.mu > 0).tolist(), strict=True))
        gains = [FAR_GAIN if is_far else gain for is_far in far.tolist()]
        assert state.scale is not None
        scales = zip(state.scale.tolist(), runs, gains, strict=True)
        _fill(state.scale, [next_scale(s, m, nats, gain=g, binding=b) for s, (m, nats, b), g in scales])
        if self.distillation is not None:
            weights = zip(self.distillation.weights[rows].tolist(), value.tolist(), runs, strict=True)
            new = [next_weight(w, v, nats, gain, binding=b) for w, v, (_, nats, b) in weights]
            _fill(self.distillation.weights[rows], new)

    def _running(self, latest: Tensor, state: MethodState) -> Tensor:
        """Return the measured value of each run from the latest of each batch, of shape (runs,)."""
        sizes = torch.tensor([len(batch) for batch in self.gauge.batches()])
        known, counts = latest.nan_to_num(0.0, posinf=math.inf) * sizes, ~latest.isnan() * sizes
        batches = [math.ceil(size / self.gauge.batch) for size in self.gauge.sizes]
        parts = zip(torch.split(known, batches, 1), torch.split(counts, batches, 1), strict=True)
        return _over_tasks(torch.stack([value.sum(1) / count.sum(1) for value, count in parts], 1), state)

    def _measure(self, stack: Stack, rows: slice, state: MethodState) -> Tensor:
        """Return the measured value of each run on all gauges, of shape (runs,)."""
        return _over_tasks(self.gauge.task_means(stack)[rows].nan_to_num(math.inf), state)

    @torch.no_grad()
    def finish(self, stack: Stack) -> None:
        """Return each run towards its anchor until the measured value is within its budget."""
        if not self.gauge.sizes:
            return
        for rows, state in self.groups.moored:
            state.bind(rows_of(stack.parameters, rows), ())
            named = _named(state).to(state.mu.device)
            unkept = return_to_budget(state, named, partial(self._measure, stack, rows, state))
            if bool(unkept.any()):
                warn(
                    f"the budget of {int(unkept.sum())} runs of {state.method.name} cannot be kept: at the anchor "
                    "itself more is measured, because statistics of normalization layers have changed",
                    UnheldWarning,
                )

    def keep(self, rows: Tensor) -> None:
        """Keep only the runs in these rows."""
        self.gauge.keep(rows)
        self.latest = self.latest[rows.cpu()]


def _named(state: MethodState) -> Tensor:
    """Return the budget of each run in its present task, float64 on the CPU."""
    assert isinstance(state.pull, Budget)
    return torch.as_tensor(state.pull.nats).double().cpu()


def _over_tasks(means: Tensor, state: MethodState) -> Tensor:
    """Return one value for each run from those of its gauges, (runs, tasks); NaN where nothing was measured."""
    return means.nanmean(1)


def _fill(tensor: Tensor, values: list[float]) -> None:
    """Set the values in place, because recorded steps read this memory."""
    tensor.copy_(torch.tensor(values, dtype=tensor.dtype))
