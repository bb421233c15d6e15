"""DER++: replay of samples with the outputs that the model had when they were stored, and with their labels.

P. Buzzega, M. Boschini, A. Porrello, D. Abati, S. Calderara: Dark experience for general continual learning: a strong,
simple baseline, NeurIPS 2020. The loss of a step is that of the batch, plus alpha times the squared distance to stored
outputs on one draw from the memory, plus beta times the cross-entropy on another. As in the authors' code, a batch is
offered to the reservoir after its step in every epoch, and the squared distance is a mean over the outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mooring_lab.fleet.learner_plugin import EpochPlan, PluginState, Step
from mooring_lab.fleet.replay_memory import ReplayMemory, Reservoir
from mooring_lab.model.method import ReplayOptions
from mooring_lab.model.spec import RunSpec

if TYPE_CHECKING:
    from mooring_lab.fleet.fleet import Fleet

LABEL_WEIGHT = 0.5
"""The paper's beta, which is 0.5 or 1 in its experiments; alpha is the strength."""


class SlotReservoir(Reservoir):
    """A reservoir that also says where samples are kept, so that a device can keep what belongs to them.

    Example:
        >>> memory = SlotReservoir(seeds=[0], capacity=3)
        >>> plan = memory.plan_slots(torch.arange(4).view(1, 4), [2, 2])
        >>> plan[0], plan[1].shape  # at first nothing to draw
        (tensor([[0, 1]]), torch.Size([1, 8]))
    """

    def plan_slots(self, order: Tensor, sizes: Sequence[int], count: int | None = None) -> list[Tensor]:
        """Draw twice for every step of an epoch in advance, and offer each batch after its step.

        Args:
            order: the epoch's indices, of shape (runs, images).
            sizes: the number of images in each batch; a step draws as many from memory, twice.
            count: the number of indices in each draw instead.

        Returns:
            For each step the indices of both draws, the slots of the first draw, and the slots of the batch, which
            are beyond the capacity for samples that are not kept; of shape (runs, 3 * drawn + batch).
        """
        steps = []
        for taken in torch.split(order, list(sizes), 1):
            parts: list[Tensor] = []
            if len(self):
                first, second = (self.draw_slots(count or taken.shape[1]) for _ in range(2))
                parts = [self.kept.gather(1, first), self.kept.gather(1, second), first]
            steps.append(torch.cat([*parts, self._places_of_next(taken.shape[1])], 1))
            self.offer(taken)
        return steps

    def _places_of_next(self, count: int) -> Tensor:
        """Return the slot of each of the next indices, or capacity + its column, of shape (runs, count)."""
        capacity = self.kept.shape[1]
        places = torch.arange(capacity, capacity + count).repeat(len(self.seeds), 1)
        for runs, slots in self._slots_of_next(count):
            last = {slot: column for column, slot in enumerate(slots.tolist()) if slot < capacity}
            for run in runs:
                places[run, list(last.values())] = torch.tensor(list(last), dtype=torch.int64)
        return places


class DarkExperience(ReplayMemory):
    """The stored outputs of every run, and the loss that they add to a step.

    Attributes:
        logits: the outputs of each slot, of shape (runs, capacity + batch, outputs); NaN for those that the head did
            not have yet. The slots beyond the capacity are written and never read.
        alpha: the strengths, of shape (runs,).
    """

    reservoir = SlotReservoir
    memory: SlotReservoir
    ahead: SlotReservoir

    def __init__(self, options: ReplayOptions, specs: Sequence[RunSpec], fleet: Fleet) -> None:
        super().__init__(options, specs, fleet)
        slots = (specs[0].memory or 0) + specs[0].batch
        self.logits = fleet.like.new_full((len(specs), slots, fleet.stream.outputs), torch.nan)
        self.alpha = fleet.like.new_tensor([spec.strength or 0.0 for spec in specs])

    def plan_epoch(self, fleet: Fleet, plan: EpochPlan) -> None:
        """Draw twice for every step, and say where the batch is stored."""
        self.ahead = deepcopy(self.memory)
        plan.replayed = self.ahead.plan_slots(plan.order, plan.sizes, self.options.recalls)

    def losses(self, fleet: Fleet, step: Step) -> tuple[Tensor, Tensor, Tensor]:
        """Return the logits and losses of the batch, and the losses with those on replayed samples."""
        logits, losses, total = super().losses(fleet, step)
        assert step.replayed is not None
        batch = step.indices.shape[1]
        drawn = (step.replayed.shape[1] - batch) // 3
        first, second, slots, self.places = torch.split(step.replayed, [drawn, drawn, drawn, batch], 1)
        if drawn:
            replayed, label_loss = fleet.passes.losses(first, None)[0], fleet.passes.losses(second, None)[1]
            total = losses + der_loss(replayed, self.stored(slots), label_loss, self.alpha)
        return logits, losses, total

    def gradients(self, fleet: Fleet, step: Step) -> None:
        """Store the outputs of the batch, from before the step."""
        self.store(self.places, step.logits)

    def store(self, slots: Tensor, logits: Tensor) -> None:
        """Keep outputs in these slots, of shape (runs, batch); a head that grows has more of them later."""
        self.logits[..., : logits.shape[-1]].scatter_(1, slots.unsqueeze(-1).expand_as(logits), logits.detach())

    def stored(self, slots: Tensor) -> Tensor:
        """Return the outputs in these slots, of shape (runs, drawn, outputs)."""
        return self.logits.gather(1, slots.unsqueeze(-1).expand(-1, -1, self.logits.shape[-1]))

    def keep(self, rows: Tensor) -> None:
        """Keep the runs in these rows."""
        super().keep(rows)
        self.logits, self.alpha = self.logits[rows], self.alpha[rows]

    def state_dict(self) -> PluginState:
        """Return the memory with its outputs."""
        state = super().state_dict()
        return PluginState({**state.tensors, "logits": self.logits}, state.values)

    def load_state_dict(self, fleet: Fleet, state: PluginState) -> None:
        """Continue from that memory."""
        super().load_state_dict(fleet, state)
        self.logits = state.tensors["logits"].to(self.logits.device)


def der_loss(logits: Tensor, stored: Tensor, label_loss: Tensor, alpha: Tensor) -> Tensor:
    """Compute alpha * mean((logits - stored)^2) + beta * label_loss of each run, of shape (runs,).

    Args:
        logits: of the first draw, of shape (runs, drawn, outputs).
        stored: what was stored for it; outputs that are NaN, or that it has beyond those of `logits`, do not count.
        label_loss: the mean cross-entropy on the second draw, of shape (runs,).
        alpha: of shape (runs,).

    Example:
        >>> one = torch.ones(1)
        >>> der_loss(torch.zeros(1, 3, 2), torch.full((1, 3, 2), 2.0), label_loss=6 * one, alpha=0.1 * one)
        tensor([3.4000])
    """
    stored = stored[..., : logits.shape[-1]]
    known = ~stored.isnan()
    squares = torch.where(known, logits - stored, 0.0).square().sum((1, 2))
    return alpha * squares / known.sum((1, 2)) + LABEL_WEIGHT * label_loss
