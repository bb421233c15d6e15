"""The reference as a plugin: measured budgets and distillation on samples of past tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mooring.errors import MooringError
from mooring.rules import Budget
from mooring_lab.fleet.learner_plugin import EpochPlan, LearnerPlugin, PluginState, Step
from mooring_lab.fleet.reference import Reference
from mooring_lab.methods.budgets import ReferenceOptions
from mooring_lab.model.spec import RunSpec

if TYPE_CHECKING:
    from mooring_lab.fleet.fleet import Fleet


class ReferencePlugin(LearnerPlugin):
    """A `Reference` in the loop of a fleet."""

    options: ReferenceOptions

    def __init__(self, options: ReferenceOptions, specs: Sequence[RunSpec], fleet: Fleet) -> None:
        super().__init__(options, specs, fleet)
        self.reference = Reference(options.measures, options.distils, specs, fleet.training_data, fleet.groups)
        if options.measures:
            for _, state in fleet.groups.moored:
                if not isinstance(state.pull, Budget):
                    raise MooringError(
                        f"method {state.method.name!r} measures on a reference, and {type(state.pull).__name__} has no "
                        "budget to keep: give a pull such as lambda nats: Budget(nats), or no reference"
                    )
                state.scale = torch.ones_like(state.mu)

    def plan_epoch(self, fleet: Fleet, plan: EpochPlan) -> None:
        """Distil one batch of kept samples after the other."""
        if self.reference.distillation:
            steps = len(plan.sizes)
            plan.replayed = self.reference.distillation.plan(len(fleet.specs), plan.epoch * steps, steps)

    def gradients(self, fleet: Fleet, step: Step) -> None:
        """Add the gradients of the divergence on kept samples; the curvature of layers does not see them."""
        if step.replayed is None or self.reference.distillation is None:
            return
        with fleet.groups.unobserved():
            divergence = self.reference.distillation.samples.divergence(fleet.stack, step.replayed[0])
            own = fleet.passes.gradients(divergence.double().mean(1).sum())
        gradients, added = step.gradients, self.reference.distillation.weighted(own, step.gradients, fleet.groups.names)
        if self.options.measures:
            step.added = added
        else:  # one loss of both
            step.gradients = {**added, **{n: g + added[n] if n in added else g for n, g in gradients.items()}}

    def finish_step(self, fleet: Fleet, number: int) -> None:
        """Measure if it is due."""
        if self.reference.budgets:
            self.reference.budgets.after_step(fleet.stack, number + 1)

    def end_task(self, fleet: Fleet, task: int) -> None:
        """Return runs to their budgets."""
        if self.reference.budgets:
            self.reference.budgets.finish(fleet.stack)

    def remember(self, fleet: Fleet, task: int, order: Tensor) -> None:
        """Keep samples of the task."""
        if task + 1 < len(fleet.stream.tasks):
            self.reference.start_task(order, fleet.stack)

    def keep(self, rows: Tensor) -> None:
        """Keep the runs in these rows."""
        self.reference.keep(rows)

    def set_strengths(self, specs: Sequence[RunSpec]) -> None:
        """Give each run the strength of its spec."""
        if self.reference.distillation:
            self.reference.distillation.set_strengths(specs)

    def state_dict(self) -> PluginState:
        """Return the kept samples and what was measured on them."""
        return PluginState(self.reference.tensors(), {"sizes": self.reference.sizes()})

    def load_state_dict(self, fleet: Fleet, state: PluginState) -> None:
        """Continue from these."""
        tensors = {name: tensor.to(fleet.device) for name, tensor in state.tensors.items()}
        self.reference.load(state.values["sizes"], tensors)
