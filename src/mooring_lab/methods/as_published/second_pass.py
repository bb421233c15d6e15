"""MAS as published: the gradient of ||f||^2, of a second pass after the optimizer's step, is added to the task's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from mooring.rules import Iteration, State
from mooring.rules.ewc import RunningAverage, average
from mooring.rules.mas import sensitivity
from mooring_lab.fleet.learner_plugin import LearnerPlugin, Step

if TYPE_CHECKING:
    from mooring_lab.fleet.fleet import Fleet


@dataclass(frozen=True)
class AddedMAS(RunningAverage):
    """current <- decay * current + (1 - decay) * |g + grad of sum ||f(x)||^2|, with f after the step."""

    needs_anchor: ClassVar[bool] = False

    def update(self, state: State, it: Iteration) -> None:
        """Update the running average; a parameter on which the outputs do not depend has g alone."""
        score = it.g if it.probe is None else it.g + it.probe
        average(state["current"], sensitivity(score), self.decay, it.count, out=state["current"])


class SecondPass(LearnerPlugin):
    """Importances and pulls after a second pass over each batch, in training mode as the first one."""

    def gradients(self, fleet: Fleet, step: Step) -> None:
        """Keep the gradients with the penalty's, of the parameters before the step."""
        with torch.no_grad():
            step.penalized = fleet.groups.penalized(fleet.stack.parameters, step.gradients)

    def after_step(self, fleet: Fleet, step: Step) -> None:
        """Score and pull with the gradient of the squared outputs."""
        logits, _ = fleet.passes.losses(step.indices, step.head_task)
        fleet.groups.score_late(step, fleet.passes.gradients(logits.square().sum()))
