"""The controller of a measured budget, over a vector of runs: a model is the case of one run.

The rules are functions of float64 tensors of shape (runs,). `BudgetController` says when they act, and on what: every
few steps one batch of past data is measured. The latest values of all batches together give the measured value, which
sets what the budget's estimate may spend; the value of the batch sets the weight of distillation. At the end of a task
the measured value is brought within the budget (`mooring.hold.finish`).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mooring.backends.host_copy import HostCopy
from mooring.hold.distil import WeightedDistillation
from mooring.hold.finish import (
    FEWEST_UPDATES,
    Ends,
    ParameterAverage,
    Path,
    between_anchor_and,
    move,
    return_path,
    strongest_first,
)
from mooring.hold.repair import Sides, repair
from mooring.reference.pass_cost import MEASURING_INTERVAL
from mooring.rules import Budget
from mooring.state.parameter_state import ParameterState

GAIN = 1.0
"""The controller's gain over one pass through all batches of the gauges."""

FAR, FAR_GAIN = 3.0, 0.5
"""If a batch exceeds the budget by the first factor, it is acted upon alone, with the second as the gain."""

MAX_FALL, MAX_RISE = 8.0, 2.0
"""The largest factors by which one measurement lowers and raises what may be spent."""

SIGNIFICANT = 0.1
"""The part of the budget above which a measured value says how wrong the estimate is."""

SMALLEST_SCALE = 0.01
"""The smallest scale that a measured value gives the estimate of tasks without a gauge."""


def next_scale(scale: Tensor, measured: Tensor, named: Tensor, gain: Tensor, binding: Tensor) -> Tensor:
    """Return the next factor between the estimate that may be spent and the budget that was named.

    scale <- scale * (named / measured)^gain. Near the anchor the divergence grows in proportion to the estimate, so
    a gain of 1 would be exact if the parameters followed at once, and a smaller one is stable. It is raised only
    while the budget's pull acts: otherwise training has not used what it already may.

    Args:
        scale: the present factor.
        measured: what was measured; infinite if the outputs are not finite.
        named: the budget.
        gain: between 0 and 1.
        binding: whether the pull acts, bool.

    Example:
        >>> one = torch.ones(2, dtype=torch.float64)
        >>> next_scale(one, torch.tensor([0.4, 0.05]).double(), 0.1 * one, 0.5 * one, torch.tensor([True, False]))
        tensor([0.5000, 1.0000], dtype=torch.float64)
    """
    change = (named / measured.maximum(named * 1e-6)).pow(gain).clamp(1 / MAX_FALL, MAX_RISE)
    change = torch.where((change < 1) | binding, change, 1.0)
    return scale * torch.where(measured.isfinite(), torch.where(named > 0, change, 1.0), 1 / MAX_FALL)


def running_value(latest: Tensor, samples: Tensor, batches: Sequence[int]) -> Tensor:
    """Return the measured value of each run: the mean over past tasks of the latest values; NaN if there is none.

    Args:
        latest: of each batch, of shape (runs, batches); NaN where there is none.
        samples: of each batch, of shape (batches,).
        batches: the number of batches of each past task.

    Example:
        >>> running_value(torch.tensor([[1.0, 3.0, math.nan]]), torch.tensor([2.0, 2.0, 2.0]), [2, 1])
        tensor([2.])
    """
    counts = torch.where(latest.isnan(), 0.0, samples)
    sums = torch.where(latest.isnan(), 0.0, latest) * counts
    parts = zip(torch.split(sums, [*batches], 1), torch.split(counts, [*batches], 1), strict=True)
    return torch.stack([total.sum(1) / count.sum(1) for total, count in parts], 1).nanmean(1)


def scale_of_estimate(energy: Tensor, allowed: Tensor, measured: Tensor, named: Tensor) -> Tensor:
    """Return the scale with which the estimate would be what was measured: at most 1, and not below SMALLEST_SCALE.

    It is not much less than 1, because excluded parameters and statistics add to what is measured, and not to the
    estimate; and it is 1 where too little was measured to say.

    Args:
        energy: the estimate.
        allowed: what the estimate may be.
        measured: the measured value, without noise.
        named: the budget.

    Example:
        >>> scale_of_estimate(*(torch.tensor([value]) for value in (0.1, 0.1, 0.2, 0.1)))
        tensor([0.5000])
    """
    fitting = (energy / allowed * named / measured).clamp(SMALLEST_SCALE, 1.0)
    return torch.where((measured > SIGNIFICANT * named) & measured.isfinite() & (energy > 0), fitting, 1.0)


@dataclass(frozen=True)
class _PendingMeasurement:
    """A measurement of one batch whose result is on its way to the host.

    Attributes:
        index: the number of the batch.
        step: the number of steps in the task.
        terms: the sums and counts of its samples, (2, runs, samples).
        binding: whether the pull acted in that step, of shape (runs,).
    """

    index: int
    step: int
    terms: HostCopy
    binding: HostCopy


class BudgetController(ABC):
    """Makes what is measured meet the budget of each run.

    A subclass holds one model, or the runs of a fleet, and says how they are measured and pulled.

    Args:
        runs: their number.

    Attributes:
        distillation: the weight of what is distilled; None if nothing is.
        average: the average of the trained parameters in this task; empty unless the budget takes it.
        latest: the last measured value of each batch in this task, float64 of shape (runs, batches); NaN before.
        samples: the number of samples of each batch, as it was last measured.
        largest: the largest scale of each run, finite where a past task has no gauge and is held by the estimate.
        rewritten: whether parameters were written since the last step.
        endings: what the last end of a task did to any run, in words.
    """

    def __init__(self, runs: int = 1) -> None:
        self.runs = runs
        self.distillation: WeightedDistillation | None = None
        self.average = ParameterAverage()
        self.latest, self.samples = torch.zeros(runs, 0, dtype=torch.float64), torch.zeros(0, dtype=torch.float64)
        self.largest = torch.full((runs,), math.inf, dtype=torch.float64)
        self.rewritten, self.endings = False, list[str]()
        self._pending: _PendingMeasurement | None = None

    # What a subclass holds

    @property
    @abstractmethod
    def budget(self) -> Budget:
        """The budget, whose nats are one number or one per run."""

    @property
    @abstractmethod
    def task(self) -> int:
        """The number of consolidated tasks."""

    @property
    @abstractmethod
    def records(self) -> Collection[ParameterState]:
        """The states of the moored parameters."""

    @abstractmethod
    def batches_of_gauges(self) -> list[int]:
        """Return the number of batches of the gauge of each past task."""

    @abstractmethod
    def measure_batch(self, index: int) -> Tensor:
        """Return the sums and counts of the samples of a batch, (2, runs, samples), without waiting for the device."""

    @abstractmethod
    def measure_runs(self) -> Tensor:
        """Return the measured values on all gauges, (values, runs) on the host; the first row is the divergence."""

    @abstractmethod
    def get_scales(self) -> Tensor:
        """Return the factor of what the estimate of each run may spend, on the host."""

    @abstractmethod
    def set_scales(self, scales: Tensor) -> None:
        """Set the factors."""

    @abstractmethod
    def binding(self) -> Tensor:
        """Return whether the pull of each run acts in this step, without waiting for the device."""

    @abstractmethod
    def energy(self) -> Tensor:
        """Return what each run has spent by the estimate, on the host."""

    @abstractmethod
    def pull(self) -> None:
        """Apply the budget's pull now."""

    @abstractmethod
    def multipliers(self) -> Any:
        """Return the multipliers, from which the next search starts."""

    @abstractmethod
    def load_multipliers(self, multipliers: Any, runs: Tensor) -> None:
        """Continue from the multipliers of these runs."""

    @abstractmethod
    def averaged_parameters(self) -> Collection[Tensor]:
        """Return the parameters that are trained."""

    @abstractmethod
    def set_acts(self, acts: bool) -> None:
        """Set whether the budget's pull acts."""

    @abstractmethod
    def sides(self) -> Sides | None:
        """Return what a repair moves; None if nothing can be repaired."""

    @abstractmethod
    def warn_of_return(self, runs: Tensor, before: Tensor, share: Tensor) -> None:
        """Warn of runs that were returned towards their anchors.

        Args:
            runs: which runs.
            before: what was measured before the return.
            share: the part of what training moved that is left, of shape (runs,).
        """

    @abstractmethod
    def warn_of_unkept(self, runs: Tensor, least: Tensor) -> None:
        """Warn of runs that exceed their budget even at the anchor, where `least` is measured."""

    # Through a task

    @property
    def named_of_runs(self) -> Tensor:
        """The budget of each run."""
        return torch.as_tensor(self.budget.nats, dtype=torch.float64).cpu().expand(self.runs)

    @property
    def allowed_of_runs(self) -> Tensor:
        """What the estimate of each run may be, at a scale of 1."""
        return torch.as_tensor(self.budget.allowed(self.task), dtype=torch.float64).cpu().expand(self.runs)

    @property
    def distils_all(self) -> bool:
        """Whether distillation holds all past tasks, so that no pull has to hold one by its estimate."""
        return self.distillation is not None and bool(self.largest.isinf().all())

    def begin(self) -> None:
        """Start a task whose gauges are known."""
        self.set_acts(not self.distils_all)
        if self.distillation:
            self.distillation.start(self.runs)
        batches = sum(self.batches_of_gauges())
        self.latest = torch.full((self.runs, batches), math.nan, dtype=torch.float64)
        self.samples = torch.zeros(batches, dtype=torch.float64)
        self.average = ParameterAverage()

    def after_step_of_runs(self, steps: int) -> None:
        """Measure the next batch if it is due after this step of the task, and average the parameters."""
        number, remainder = divmod(steps, MEASURING_INTERVAL)
        if remainder or not self.latest.shape[1]:
            return
        index = (number - 1) % self.latest.shape[1]
        terms = HostCopy(self.measure_batch(index))
        self._pending = _PendingMeasurement(index, steps, terms, HostCopy(self.binding()))
        if terms.ready:
            self.settle()
        self.average.update(self.averaged_parameters() if self.averages else ())

    @property
    def averages(self) -> bool:
        """Whether the end of a task may take the average of the parameters."""
        return self.budget.average is not False

    def settle(self) -> Tensor | None:
        """Adjust what may be spent by the last measurement, if its result was not read yet.

        On a GPU the result is read in the next step, after its backward pass is queued, so that the GPU has work while
        the host waits. Nothing depends on it before.

        Returns:
            The measured value with it.
        """
        if self._pending is None:
            return None
        pending, self._pending = self._pending, None
        (sums, counts), binding = pending.terms.read(), pending.binding.read()
        if not bool(counts.any()):
            return None  # a batch of padding alone
        value = (sums.sum(1) / counts.sum(1)).nan_to_num(math.inf, posinf=math.inf)
        named = self.named_of_runs
        far = ~(value <= FAR * named)
        self.latest[far] = math.nan  # what was measured before says little by now
        self.latest[:, pending.index] = value
        self.samples[pending.index] = (counts > 0).sum(1).amax().clamp(min=1)
        measured = running_value(self.latest, self.samples, self.batches_of_gauges())
        if self.distillation:
            self.distillation.adjust(value, named, self.latest.shape[1])
        if not self.distils_all:
            gain = torch.full_like(named, GAIN / self.latest.shape[1])
            scales = next_scale(self.get_scales(), measured, named, torch.where(far, FAR_GAIN, gain), binding)
            self.set_scales(scales.minimum(self.largest))
        return measured

    # At its end

    @torch.no_grad()
    def finish_runs(self) -> Tensor:
        """Bring the measured value of each run within its budget.

        The average of the parameters takes their place first, see `take_average`. Runs that are above their budget
        then are repaired (`mooring.hold.repair`). What is still above it is returned towards the anchor: by the
        budget's own pull, if it holds something, because that gives up less of what was learned, then straight.

        Returns:
            What is measured then, (values, runs).
        """
        self.settle()
        self.endings = []
        measured = self.take_average(self.measure_runs())
        over = ~(measured[0] <= self.named_of_runs)
        repairable = over & (self.named_of_runs > 0)
        if bool(repairable.any()) and (sides := self.sides()) is not None:
            weight = self.distillation.weight if self.distillation else torch.ones_like(measured[0])
            measured = repair(sides, repairable, self.named_of_runs, measured, weight)
            self.endings.append("a repair")
            over = ~(measured[0] <= self.named_of_runs)
        if not bool(over.any()):
            return measured
        ends, scales = [(state, state.theta.clone()) for state in self.records], self.get_scales()
        least = measured
        for path, leads in (self._pull_path(ends), self._straight_path(ends)):
            if bool((over & leads).any()):
                kept, least, share = return_path(path, over & leads, self.named_of_runs, self.measure_runs)
                if bool(kept.any()):
                    self.endings.append(f"a return to {100 * float(share[kept].min()):.0f} % of the way")
                    self.warn_of_return(kept, measured[0], share)
                measured, over = torch.where(kept, least, measured), over & ~kept
                self.set_scales(scales)  # those of training, from which the next task starts
        if bool(over.any()):
            move([state.theta for state, _ in ends], [end for _, end in ends], over)
            self.warn_of_unkept(over, least[0])
        return measured

    def take_average(self, last: Tensor) -> Tensor:
        """Replace the parameters by their average where that keeps the budget, or has forgotten no more than they have.

        Parameters that were written since the last step, such as the best of a training, are not replaced.

        Args:
            last: the measured values of the last parameters.

        Returns:
            Those of the parameters that are taken.
        """
        fewest = 1 if self.budget.average else FEWEST_UPDATES
        known = self.averages and not self.rewritten
        pairs = self.average.pairs(self.averaged_parameters(), fewest) if known else []
        if not pairs:
            return last
        parameters, averages = map(list, zip(*pairs, strict=True))
        ends = [theta.clone() for theta in parameters]
        torch._foreach_copy_(parameters, averages)
        taken, measured = torch.zeros(self.runs, dtype=torch.bool), last
        try:
            measured = self.measure_runs()
            taken = measured[0] <= last[0].maximum(self.named_of_runs)
        finally:
            move(parameters, ends, ~taken)
        if bool(taken.any()):
            self.endings.append("the average of the last steps")
        return torch.where(taken, measured, last)

    def limit_to_measured(self, measured: Tensor) -> None:
        """Let the estimate hold a task that ends without a gauge, as strictly as the measured value shows is needed."""
        scale = scale_of_estimate(self.energy(), self.allowed_of_runs, measured, self.named_of_runs)
        self.largest = self.largest.minimum(scale)

    def _pull_path(self, ends: Ends) -> tuple[Path, Tensor]:
        """Return the path along which the budget's pull gets stronger, and which runs have something to pull."""
        energy, allowed, start = self.energy(), self.allowed_of_runs, self.multipliers()
        starts = [end for _, end in ends]

        def path(t: Tensor, runs: Tensor) -> None:
            thetas = [state.theta for state, _ in ends]
            others = ([theta.clone() for theta in thetas], self.multipliers()) if not bool(runs.all()) else None
            self.load_multipliers(start, runs)  # the search depends on where it starts
            move(thetas, starts, runs)
            self.set_scales(strongest_first(t, energy, allowed))
            self.pull()
            if others:
                move(thetas, others[0], ~runs)
                self.load_multipliers(others[1], ~runs)

        return path, (energy > 0) & energy.isfinite() & (allowed > 0) & (not self.distils_all)

    def _straight_path(self, ends: Ends) -> tuple[Path, Tensor]:
        def path(t: Tensor, runs: Tensor) -> None:
            for state, end in ends:
                move([state.theta], [between_anchor_and(end, state, t)], runs)

        return path, torch.ones(self.runs, dtype=torch.bool)
