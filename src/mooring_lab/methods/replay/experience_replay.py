"""Experience replay: the loss is that of the batch and of samples of the memory together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mooring_lab.fleet.learner_plugin import Step
from mooring_lab.fleet.replay_memory import ReplayMemory

if TYPE_CHECKING:
    from mooring_lab.fleet.fleet import Fleet


class ExperienceReplay(ReplayMemory):
    """Batches that samples of the memory are added to; each sample is trained with its own task's head."""

    def choose_batch(self, fleet: Fleet, step: Step) -> None:
        """Add the replayed samples."""
        step.head_task = None
        if step.replayed is not None:
            step.indices = torch.cat([step.indices, step.replayed], 1)
