"""The parts of a Mooring, which are replaced together when a saved state has other rules."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mooring.diagnose.coverage_watch import CoverageWatch
from mooring.hold.measured_budget import MeasuredBudget
from mooring.hold.unmeasured import Unmeasured
from mooring.state.chosen_rules import Rules
from mooring.state.memory import Memory
from mooring.state.mooring_state import MooringState
from mooring.step import TrainingStep


@dataclass(frozen=True)
class Parts:
    """The parts of a Mooring.

    Attributes:
        rules: the rules.
        states: the states of the moored parameters.
        watch: warns of what nothing holds.
        step: the hooks around the optimizer's step.
        meter: measures forgetting, if the pull is a measured budget.
    """

    rules: Rules
    states: MooringState
    watch: CoverageWatch
    step: TrainingStep
    meter: MeasuredBudget | Unmeasured

    @classmethod
    def create(
        cls,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        rules: Rules,
        memory: Memory,
        *,
        exclude: tuple[str, ...],
        outputs: Callable[[Any], Tensor] | None,
        check_finite: bool | str,
    ) -> "Parts":
        """Create the parts for rules; the arguments are those of `attach`, checked."""
        states = MooringState(model, optimizer, rules.importance, rules.merge, exclude, memory, rules.product)
        watch = CoverageWatch(states, rules.pull)
        step = TrainingStep(states, rules.pull, rules.buffers, check_finite, outputs, watch)
        if step.budget is None or not step.budget.budget.measured:
            return cls(rules, states, watch, step, Unmeasured())
        step.meter = meter = MeasuredBudget(states, step.budget)
        return cls(rules, states, watch, step, meter)

    @contextmanager
    def restored_on_error(self) -> Iterator[None]:
        """Restore what is known of this task, and what is distilled, if the body fails."""
        distillation, largest = self.meter.distillation, self.meter.largest_scale
        try:
            with self.states.restored_on_error():
                yield
        except BaseException:
            if isinstance(self.meter, MeasuredBudget):
                self.meter.distillation, self.meter.largest_scale = distillation, largest
            raise
