"""Replay as the paper's public code has it: slots that are overwritten at random, and slices of neighbouring slots.

https://github.com/EkdeepSLubana/QRforgetting, commit 317fd2d. Heads are fresh; experience replay takes a step on the
slice and then one on the batch; A-GEM projects the gradient of the backbone alone. The slot that stays black in that
code is filled here.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mooring_lab.fleet.learner_plugin import EpochPlan, Step
from mooring_lab.fleet.replay_memory import ReplayMemory, Reservoir
from mooring_lab.methods.replay.agem import AGEM
from mooring_lab.model.order import seeded_generator

if TYPE_CHECKING:
    from mooring_lab.fleet.fleet import Fleet

EMPTY = -1
"""The content of a slot that was never written."""


class SlotMemory(Reservoir):
    """Slots of which every task overwrites a part at its end: capacity // number of tasks, chosen at random.

    Attributes:
        kept: int64 of shape (runs, capacity); `EMPTY` where nothing was written.
        offered: the number of tasks so far.

    Example:
        >>> memory = SlotMemory([0], capacity=4)
        >>> memory.offer(torch.tensor([[5, 6, 7, 8, 9]]))
        >>> memory.kept.sort().values, memory.offered
        (tensor([[5, 6, 7, 8]]), 1)
    """

    def __init__(self, seeds: Sequence[int], capacity: int) -> None:
        super().__init__(seeds, capacity)
        self.kept.fill_(EMPTY)

    def __len__(self) -> int:
        """Return how many slots every run has filled."""
        return int((self.kept != EMPTY).sum(1).min()) if len(self.kept) else 0

    def offer(self, indices: Tensor) -> None:
        """Overwrite slots with the first samples of a task, int64 of shape (runs, n)."""
        self.offered += 1
        capacity = self.kept.shape[1]
        count = min(indices.shape[1], capacity // self.offered)
        for run, seed in enumerate(self.seeds):
            slots = torch.randperm(capacity, generator=seeded_generator(seed, "slots", self.offered))[:count]
            self.kept[run, slots] = indices[run, :count]

    def sample(self, count: int) -> Tensor:
        """Return the samples in neighbouring filled slots, from a random one on: int64 of shape (runs, count)."""
        self.drawn += 1
        drawn = torch.empty(len(self.kept), count, dtype=torch.int64)
        for run, seed in enumerate(self.seeds):
            filled = self.kept[run][self.kept[run] != EMPTY]
            random = seeded_generator(seed, "slice", self.drawn)
            first = torch.randint(max(1, len(filled) - count), (), generator=random)
            drawn[run] = filled[(first + torch.arange(count)) % len(filled)]
        return drawn


class SliceReplay(ReplayMemory):
    """Experience replay in two steps: on a slice of the memory, then on the batch."""

    reservoir = SlotMemory

    def plan_epoch(self, fleet: Fleet, plan: EpochPlan) -> None:
        """Put a slice before every batch."""
        self.ahead = deepcopy(self.memory)
        if len(self.ahead):
            batches = torch.split(plan.order, plan.sizes, 1)
            steps = [*chain.from_iterable((self.ahead.sample(fleet.common.batch), batch) for batch in batches)]
            plan.order, plan.sizes = torch.cat(steps, 1), [step.shape[1] for step in steps]

    def choose_batch(self, fleet: Fleet, step: Step) -> None:
        """Use each sample's own head."""
        step.head_task = None


class SliceAGEM(AGEM):
    """A-GEM with slices of the memory, which projects the gradient of the backbone alone."""

    reservoir = SlotMemory

    def plan_epoch(self, fleet: Fleet, plan: EpochPlan) -> None:
        """Draw a slice for every step."""
        self.ahead = deepcopy(self.memory)
        plan.replayed = self.ahead.plan(plan.order, plan.sizes, offer=False, count=fleet.common.batch)

    def gradients(self, fleet: Fleet, step: Step) -> None:
        """Project, and keep the gradients of heads as they are."""
        heads = {name: g for name, g in step.gradients.items() if name.startswith("heads.")}
        super().gradients(fleet, step)
        step.gradients = {n: g for n, g in step.gradients.items() if not n.startswith("heads.")} | heads
