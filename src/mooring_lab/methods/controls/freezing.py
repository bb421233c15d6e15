"""Backbones that no longer change after the first tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mooring_lab.fleet.learner_plugin import LearnerPlugin
from mooring_lab.methods.controls import FreezingOptions

if TYPE_CHECKING:
    from mooring_lab.fleet.fleet import Fleet


class Freezing(LearnerPlugin):
    """A backbone that is trained in the first tasks alone; then it stays in evaluation mode."""

    options: FreezingOptions

    def start_task(self, fleet: Fleet, task: int) -> None:
        """Freeze the backbone if its tasks are over."""
        frozen = task >= self.options.trained_tasks
        fleet.passes.train = not frozen
        for name, p in fleet.stack.parameters.items():
            p.requires_grad_(not (frozen and name.startswith("backbone.")))
