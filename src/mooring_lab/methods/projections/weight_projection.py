"""Parameters of the runs of a fleet projected into balls around their anchors, with learned radii: TPGM and FTP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mooring_lab.fleet.learner_plugin import EpochPlan, PluginState, Step
from mooring_lab.fleet.replay_memory import ReplayMemory
from mooring_lab.fleet.stack.stack import Tensors
from mooring_lab.methods.projections import WeightProjectionOptions
from mooring_lab.methods.projections.layer_balls import SMALLEST_RADIUS, adam_step, project, radius_gradient
from mooring_lab.methods.projections.projection import RadiusProjection
from mooring_lab.methods.projections.projection_plugin import ProjectionPlugin
from mooring_lab.model.spec import RunSpec

if TYPE_CHECKING:
    from mooring_lab.fleet.fleet import Fleet


class WeightProjection(ProjectionPlugin):
    """A ball around the anchor of each parameter in each run, from the second task on.

    Attributes:
        states: of each parameter: its anchor, its displacement before the last projection, and for each run the radius
            and what Adam keeps for it.
    """

    projection: RadiusProjection

    def gradients(self, fleet: Fleet, step: Step) -> None:
        """Learn the radii from the gradients of a training step."""
        self._learn_radii(step.gradients)

    @torch.no_grad()
    def _learn_radii(self, gradients: Tensors) -> None:
        """Take a step on the radii, by gradients of a loss at the projected parameters.

        Nothing was projected before the first step of a task: its displacement is 0, and so is the radius' gradient.
        """
        for name, state in self.states.items():
            if name in gradients:
                own = radius_gradient(gradients[name], state["displacement"], state["radius"])
                adam_step(state, own, torch.as_tensor(self.projection.radius_lr).to(own))

    @torch.no_grad()
    def after_step(self, fleet: Fleet, step: Step) -> None:
        """Project the parameters after the optimizer's step, in place."""
        self._set_displacements(fleet.stack.parameters)
        self._move(fleet.stack.parameters)

    def _set_displacements(self, parameters: Tensors) -> None:
        for name, state in self.states.items():
            state["displacement"].copy_(parameters[name] - state["anchor"])

    def _move(self, parameters: Tensors) -> None:
        for name, state in self.states.items():
            parameters[name].copy_(state["anchor"] + project(state["displacement"], state["radius"]))

    def remember(self, fleet: Fleet, task: int, order: Tensor) -> None:
        """Anchor the parameters where they are, with radii that start again; no image of the task is looked at."""
        if task + 1 == len(fleet.stream.tasks):
            return
        for name in fleet.moorable:
            theta = fleet.stack.parameters[name].detach()
            zeros = theta.new_zeros(len(theta))
            self.states[name] = {
                "anchor": theta.clone(),
                "displacement": torch.zeros_like(theta),
                "radius": torch.full_like(zeros, SMALLEST_RADIUS),
                **{key: zeros.clone() for key in ("mean", "square", "steps")},
            }


class ValidatedProjection(WeightProjection):
    """Balls whose radii are learned after each step, by the loss on the batch and on replayed samples."""

    options: WeightProjectionOptions

    def __init__(self, options: WeightProjectionOptions, specs: Sequence[RunSpec], fleet: Fleet) -> None:
        super().__init__(options, specs, fleet)
        self.replay = ReplayMemory(options, specs, fleet)

    def gradients(self, fleet: Fleet, step: Step) -> None:
        """Leave the gradients as they are."""

    @torch.no_grad()
    def after_step(self, fleet: Fleet, step: Step) -> None:
        """Take a step on the radii at the projected parameters, then project with the new radii."""
        self._set_displacements(fleet.stack.parameters)
        if self.states:
            self._move(fleet.stack.parameters)
            seen = step.indices if step.replayed is None else torch.cat([step.indices, step.replayed], 1)
            with torch.enable_grad():
                gradients = fleet.passes.validation_gradients(seen)
            self._learn_radii(gradients)
        self._move(fleet.stack.parameters)

    def plan_epoch(self, fleet: Fleet, plan: EpochPlan) -> None:
        """Draw the samples of every step."""
        self.replay.plan_epoch(fleet, plan)

    def end_epoch(self, fleet: Fleet) -> None:
        """Continue from the memory at the end of the epoch."""
        self.replay.end_epoch(fleet)

    def remember(self, fleet: Fleet, task: int, order: Tensor) -> None:
        """Offer the samples of the task, and anchor the parameters."""
        self.replay.remember(fleet, task, order)
        super().remember(fleet, task, order)

    def keep(self, rows: Tensor) -> None:
        """Keep the runs in these rows."""
        super().keep(rows)
        self.replay.keep(rows)

    def state_dict(self) -> PluginState:
        """Return the balls and the memory."""
        replay, own = self.replay.state_dict(), super().state_dict()
        return PluginState({**replay.tensors, **own.tensors}, replay.values)

    def load_state_dict(self, fleet: Fleet, state: PluginState) -> None:
        """Continue from both."""
        super().load_state_dict(fleet, state)
        self.replay.load_state_dict(fleet, state)
