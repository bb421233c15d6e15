"""The protocol of plugins: the hooks through which a method takes part in the loop of a fleet."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from mooring_lab.model.method import PluginOptions
from mooring_lab.model.spec import RunSpec

if TYPE_CHECKING:
    from mooring_lab.fleet.fleet import Fleet

Tensors = dict[str, Tensor]


@dataclass
class EpochPlan:
    """The samples of an epoch.

    Attributes:
        task, epoch: their numbers.
        order: the indices of images in each run's order, int64 of shape (runs, images).
        sizes: of the batches.
        replayed: what `Step.replayed` will be in each step, each of shape (runs, any); empty if nothing is replayed.
    """

    task: int
    epoch: int
    order: Tensor
    sizes: list[int]
    replayed: list[Tensor] = field(default_factory=list)


@dataclass
class Step:
    """One iteration of every run; hooks read and change it.

    Attributes:
        indices: of the batch's images, int64 of shape (runs, batch).
        replayed: what the plugin planned for this step; None if it is empty.
        head_task: the task whose head is trained; None for each image's own head.
        logits: of the batch, detached.
        losses: the task's mean loss of each run, detached.
        gradients: of the task's loss; importances read them.
        added: what the optimizer gets beside the gradients.
        probes: the gradients of the plugins' own functions of the outputs.
        penalized: the gradients with those of penalties, for plugins that read them after the optimizer's step.
    """

    indices: Tensor
    replayed: Tensor | None
    head_task: int | None
    logits: Tensor = field(default_factory=lambda: torch.empty(0))
    losses: Tensor = field(default_factory=lambda: torch.empty(0))
    gradients: Tensors = field(default_factory=dict)
    added: Tensors = field(default_factory=dict)
    probes: Tensors = field(default_factory=dict)
    penalized: Tensors = field(default_factory=dict)

    def select(self, runs: Tensor) -> None:
        """Keep these runs, bool of shape (runs,)."""
        self.indices, self.logits, self.losses = self.indices[runs], self.logits[runs], self.losses[runs]
        self.replayed = None if self.replayed is None else self.replayed[runs]
        self.gradients, self.added, self.probes, self.penalized = (
            {name: tensor[runs] for name, tensor in tensors.items()}
            for tensors in (self.gradients, self.added, self.probes, self.penalized)
        )


@dataclass
class PluginState:
    """What a plugin keeps between steps, for checkpoints.

    Attributes:
        tensors: each with a leading run axis.
        values: plain values, which are the same for all runs.
        groups: further states, one for the neighbouring runs of each method, with their rows alone.
    """

    tensors: Tensors = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    groups: list[PluginState] = field(default_factory=list)

    def below(self, prefix: str, device: torch.device) -> Tensors:
        """Return the tensors "prefix/name" by name, on a device; names have no slash."""
        parts = {key.rpartition("/"): tensor for key, tensor in self.tensors.items()}
        return {name: tensor.to(device) for (own, _, name), tensor in parts.items() if own == prefix}


class LearnerPlugin:
    """A part of the algorithm of every run of a fleet; hooks that it does not define do nothing.

    A fleet calls `plan_epoch`, `gradients` and `end_task` from the method's plugin inwards to the rules around the
    optimizer's step, and `after_step` and `finish_step` outwards. Hooks between `choose_batch` and `after_step` may be
    recorded as a CUDA graph: they must not wait for the device, and change in place what later steps read.

    Args:
        options: of the method.
        specs: the runs.
        fleet: of the runs; it is not kept, because a cycle of references would keep its memory.

    Attributes:
        key: the name of its state in checkpoints.
    """

    key: ClassVar[str] = "method"

    def __init__(self, options: PluginOptions, specs: Sequence[RunSpec], fleet: Fleet) -> None:
        self.options = options

    # Tasks and epochs

    def start_training(self, fleet: Fleet) -> None:
        """Run before the first step of the stream."""

    def start_task(self, fleet: Fleet, task: int) -> None:
        """Run before the steps of a task, and again if the fleet has lost runs or continues from a checkpoint."""

    def plan_epoch(self, fleet: Fleet, plan: EpochPlan) -> None:
        """Change the order of an epoch, or plan what its steps replay."""

    def end_epoch(self, fleet: Fleet) -> None:
        """Run after the last step of an epoch."""

    def end_task(self, fleet: Fleet, task: int) -> None:
        """Run after a task, while parameters may still move and runs may still share a row."""

    def remember(self, fleet: Fleet, task: int, order: Tensor) -> None:
        """Keep what later tasks need of a task that ended.

        Args:
            fleet: of the runs, with its final parameters.
            task: the number of the task.
            order: the images of the task in each run's order, int64 of shape (runs, images).
        """

    def scoring(self, fleet: Fleet, task: int) -> AbstractContextManager[None]:
        """Return a context in which the runs are scored after a task."""
        return nullcontext()

    def judge(self, fleet: Fleet) -> list[str]:
        """Return for each run why it should be rejected, empty if it should not; an empty list for no run."""
        return []

    def metrics(self, fleet: Fleet) -> list[dict[str, Any]]:
        """Return fields of each run's `Result`, or an empty list."""
        return []

    # Steps

    def start_step(self, fleet: Fleet, number: int) -> tuple[Hashable, ...]:
        """Prepare a step on the host; return what distinguishes its recording from those of other steps."""
        return ()

    def choose_batch(self, fleet: Fleet, step: Step) -> None:
        """Change the images or the head that the step trains with."""

    def losses(self, fleet: Fleet, step: Step) -> tuple[Tensor, Tensor, Tensor]:
        """Return the batch's logits, each run's loss, and what is minimized, of shape (runs,)."""
        logits, losses = fleet.passes.losses(step.indices, step.head_task)
        return logits, losses, losses

    def probe(self, fleet: Fleet, logits: Tensor) -> Tensor | None:
        """Return a function of the outputs, summed over runs, whose gradients become `Step.probes`; None for none."""
        return None

    def gradients(self, fleet: Fleet, step: Step) -> None:
        """Change the gradients before the optimizer's step."""

    def after_step(self, fleet: Fleet, step: Step) -> None:
        """Run after the optimizer's step."""

    def finish_step(self, fleet: Fleet, number: int) -> None:
        """Count or measure on the host, after a step of the task that may have been recorded."""

    # Which runs are in the fleet, and checkpoints

    def keep(self, rows: Tensor) -> None:
        """Keep the runs in these rows; a row may occur several times."""

    def set_strengths(self, specs: Sequence[RunSpec]) -> None:
        """Give each run the strength of its spec."""

    def state_dict(self) -> PluginState:
        """Return what has to be saved."""
        return PluginState()

    def load_state_dict(self, fleet: Fleet, state: PluginState) -> None:
        """Continue from what `state_dict` returned; its tensors are on the CPU."""
