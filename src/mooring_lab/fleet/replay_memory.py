"""Replay memory: a reservoir of sample indices for each run, and the plugin that fills it and draws from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mooring_lab.fleet.learner_plugin import EpochPlan, LearnerPlugin, PluginState
from mooring_lab.model.method import ReplayOptions
from mooring_lab.model.order import repeat_batches, seeded_generator
from mooring_lab.model.spec import RunSpec

if TYPE_CHECKING:
    from mooring_lab.fleet.fleet import Fleet
    from mooring_lab.fleet.stack.stack import Stack


class Reservoir:
    """A uniform sample without replacement of all indices offered so far, for each run (Vitter's algorithm R).

    The n-th offered index draws a random slot among n, and is kept if that slot is within the capacity. The random
    numbers depend only on the seed and on how many indices were offered, so a checkpoint needs no generator state.

    Args:
        seeds: the seed of each run.
        capacity: the number of indices to keep.

    Attributes:
        kept: int64 of shape (runs, capacity); the first min(offered, capacity) columns are filled.
        offered: the number of indices offered to each run.
        drawn: the number of samples drawn so far.

    Example:
        >>> memory = Reservoir(seeds=[0, 1], capacity=3)
        >>> memory.offer(torch.arange(10).expand(2, 10))
        >>> memory.kept.shape, memory.offered, memory.sample(2).shape
        (torch.Size([2, 3]), 10, torch.Size([2, 2]))
    """

    def __init__(self, seeds: Sequence[int], capacity: int) -> None:
        self.seeds = list(seeds)
        self.kept = torch.zeros(len(self.seeds), capacity, dtype=torch.int64)
        self.offered = self.drawn = 0

    def __len__(self) -> int:
        """Return how many indices each run has kept."""
        return min(self.offered, self.kept.shape[1])

    def offer(self, indices: Tensor) -> None:
        """Offer new indices to each run, of shape (runs, n)."""
        kept, offered = self.kept.numpy(), indices.numpy()
        for runs, slots in self._slots_of_next(indices.shape[1]):
            inside = slots < self.kept.shape[1]
            for run in runs:
                kept[run, slots[inside]] = offered[run, inside]  # of several indices for one slot the last stays
        self.offered += indices.shape[1]

    def _slots_of_next(self, count: int) -> Iterator[tuple[list[int], Any]]:
        """Yield the runs of each seed and the slots of the next indices, as an array; beyond capacity if not kept."""
        order, capacity = torch.arange(self.offered, self.offered + count), self.kept.shape[1]
        for seed, runs in self._by_seed().items():
            random = seeded_generator(seed, "reservoir", self.offered)
            uniform = torch.rand(count, generator=random, dtype=torch.float64)
            yield runs, torch.where(order < capacity, order, (uniform * (order + 1)).long()).numpy()

    def sample(self, count: int) -> Tensor:
        """Draw from each run's memory without replacement: int64 of shape (runs, min(count, len(self)))."""
        return self.kept.gather(1, self.draw_slots(count))

    def draw_slots(self, count: int) -> Tensor:
        """Draw filled slots of each run's memory, without replacement, as `sample` does."""
        self.drawn += 1
        chosen = torch.empty(len(self.seeds), min(count, len(self)), dtype=torch.int64)
        for seed, runs in self._by_seed().items():
            chosen[runs] = torch.randperm(len(self), generator=seeded_generator(seed, "replay", self.drawn))[:count]
        return chosen

    def _by_seed(self) -> dict[int, list[int]]:
        """Group the runs by seed: runs of one seed draw the same."""
        groups: dict[int, list[int]] = {}
        for run, seed in enumerate(self.seeds):
            groups.setdefault(seed, []).append(run)
        return groups

    def plan(
        self, order: Tensor, sizes: Sequence[int], *, offer: bool, count: int | None = None, updates: int = 1
    ) -> list[Tensor]:
        """Draw the replayed indices of every step of an epoch in advance; draws do not depend on training.

        Args:
            order: the epoch's indices, of shape (runs, images).
            sizes: the number of images in each batch; a step draws as many from memory.
            offer: whether the images of a batch are offered to the memory after its steps.
            count: the number of indices that each step draws instead.
            updates: the number of steps that each batch is trained for.
        """
        drawn = []
        for taken in torch.split(order, list(sizes), 1):
            for _ in range(updates):
                drawn.append(self.sample(count or taken.shape[1]) if len(self) else taken[:, :0])
            if offer:
                self.offer(taken)
        return drawn

    def keep(self, rows: Tensor) -> None:
        """Keep only the runs in these rows."""
        self.seeds = [self.seeds[row] for row in rows.tolist()]
        self.kept = self.kept[rows.cpu()]


def convolution_biases(stack: Stack) -> dict[str, tuple[Tensor, int]]:
    """Return the bias of each convolution of a stack by name, and the number of inputs of one of its outputs."""
    weights = {n.removesuffix("weight"): p for n, p in stack.parameters.items() if n.endswith("weight") and p.ndim > 3}
    named = ((f"{layer}bias", weight[0, 0].numel()) for layer, weight in weights.items())
    return {name: (stack.parameters[name], inputs) for name, inputs in named if name in stack.parameters}


class ReplayMemory(LearnerPlugin):
    """A reservoir for each run, from which every step gets samples as `Step.replayed`.

    What a subclass does with them is its own. The draws of an epoch are planned before it, on a copy of the memory: a
    checkpoint within an epoch has the memory from which the epoch is planned again.

    Attributes:
        memory: as it was at the start of the epoch.
        ahead: as it is at the end of the epoch.
    """

    reservoir: type[Reservoir] = Reservoir
    options: ReplayOptions

    def __init__(self, options: ReplayOptions, specs: Sequence[RunSpec], fleet: Fleet) -> None:
        super().__init__(options, specs, fleet)
        self.memory = self.ahead = self.reservoir([spec.seed for spec in specs], specs[0].memory or 0)

    def plan_epoch(self, fleet: Fleet, plan: EpochPlan) -> None:
        """Draw the samples of every step."""
        options, self.ahead = self.options, deepcopy(self.memory)
        offers = plan.epoch == 0 and not options.past_only
        count, updates = options.recalls, options.updates
        plan.replayed = self.ahead.plan(plan.order, plan.sizes, offer=offers, count=count, updates=updates)
        if updates > 1:
            plan.order, plan.sizes = repeat_batches(plan.order, plan.sizes, updates)

    def end_epoch(self, fleet: Fleet) -> None:
        """Continue from the memory at the end of the epoch."""
        self.memory = self.ahead

    def remember(self, fleet: Fleet, task: int, order: Tensor) -> None:
        """Offer the samples of a task that ended, if they enter the memory then."""
        if self.options.past_only:
            self.memory.offer(order)

    @contextmanager
    def scoring(self, fleet: Fleet, task: int) -> Iterator[None]:
        """Give convolutions random biases, as torch draws them, while models are scored that do not restore them."""
        biases = {} if self.options.restores_biases else convolution_biases(fleet.stack)
        own = {name: bias.detach().clone() for name, (bias, _) in biases.items()}
        for name, (bias, inputs) in biases.items():
            for row, seed in enumerate(self.memory.seeds):
                random = torch.rand(bias.shape[1:], generator=seeded_generator(seed, f"bias {name}", task))
                bias.data[row] = (2 * random.to(bias) - 1) / inputs**0.5
        yield
        for name, (bias, _) in biases.items():
            bias.data.copy_(own[name])

    def keep(self, rows: Tensor) -> None:
        """Keep the runs in these rows."""
        for memory in {id(m): m for m in (self.memory, self.ahead)}.values():
            memory.keep(rows)

    def state_dict(self) -> PluginState:
        """Return the memory at the start of the epoch."""
        return PluginState({"kept": self.memory.kept}, {"offered": self.memory.offered, "drawn": self.memory.drawn})

    def load_state_dict(self, fleet: Fleet, state: PluginState) -> None:
        """Continue from that memory."""
        self.memory.kept = state.tensors["kept"]
        self.memory.offered, self.memory.drawn = state.values["offered"], state.values["drawn"]
