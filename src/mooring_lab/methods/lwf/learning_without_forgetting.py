"""Learning without forgetting: old heads keep the outputs that the last task's model has on the new task's inputs.

Z. Li, D. Hoiem: Learning without forgetting, ECCV 2016. No old data is needed. The loss of a step is that of the task
plus the strength times the distillation loss, summed over the old heads. All parameters learn from both. The paper
first trains the new head alone; here it starts from the head before it, as with every method.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from mooring_lab.fleet.learner_plugin import LearnerPlugin, PluginState, Step
from mooring_lab.fleet.stack.stack import to_stack_layout
from mooring_lab.methods.lwf import LwFOptions
from mooring_lab.model.spec import RunSpec

if TYPE_CHECKING:
    from mooring_lab.fleet.fleet import Fleet


def distillation_loss(outputs: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """Compute the divergence of softmax(outputs / T) from softmax(targets / T) of each run.

    It is the cross-entropy of the paper's equation 2 less the entropy of the targets, which no gradient sees.

    Args:
        outputs: of shape (runs, batch, heads, classes).
        targets: of the same shape.
        temperature: T.

    Returns:
        The mean over the batch of the sum over heads, of shape (runs,).

    Example:
        >>> outputs, targets = torch.tensor([0.0, 0.0]), torch.tensor([2.0, 0.0])
        >>> distillation_loss(outputs.view(1, 1, 1, 2), targets.view(1, 1, 1, 2), temperature=2.0)
        tensor([0.1109])
    """
    log_q, log_p = (outputs / temperature).log_softmax(-1), (targets / temperature).log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum((-2, -1)).mean(1)


class LearningWithoutForgetting(LearnerPlugin):
    """The last task's model of every run, and the loss that its outputs add to the next task's.

    Attributes:
        teacher: parameters and buffers of the last task's models, by name; empty in the first task.
        weights: of the added loss: the strengths, of shape (runs,).
        old_heads: the heads of past tasks.
        old_outputs: the number of outputs that a head had in the task before.
    """

    options: LwFOptions

    def __init__(self, options: LwFOptions, specs: Sequence[RunSpec], fleet: Fleet) -> None:
        super().__init__(options, specs, fleet)
        self.teacher: dict[str, Tensor] = {}
        self.device = fleet.device
        self.set_strengths(specs)

    def set_strengths(self, specs: Sequence[RunSpec]) -> None:
        """Give each run the strength of its spec."""
        strengths = [spec.strength or 0.0 for spec in specs]
        self.weights = torch.tensor(strengths, dtype=torch.float64, device=self.device)

    def start_task(self, fleet: Fleet, task: int) -> None:
        """Find the heads of the tasks before this one, and the outputs that they had."""
        self.old_heads = tuple(dict.fromkeys(fleet.stream.head(number) for number in range(task)))
        self.old_outputs = fleet.stream.grown_outputs(max(0, task - 1))

    def losses(self, fleet: Fleet, step: Step) -> tuple[Tensor, Tensor, Tensor]:
        """Return the new head's logits, the task's losses, and these with the weighted distillation loss."""
        if not self.old_heads:
            return super().losses(fleet, step)
        stack, batch = fleet.stack, fleet.training_data.batch(step.indices, step.head_task)
        assert isinstance(batch.head, int)
        logits = stack(batch.x, (*self.old_heads, batch.head), train=fleet.passes.train)
        with torch.no_grad(), stack.replaced_by(self.teacher):
            targets = stack(batch.x, self.old_heads)
        own, old = logits[:, :, -1, : fleet.passes.outputs], logits[:, :, :-1, : self.old_outputs]
        per_sample = cross_entropy(own.flatten(0, 1), batch.labels.flatten(), reduction="none")
        distilled = distillation_loss(old, targets[..., : self.old_outputs], self.options.temperature)
        losses = per_sample.view_as(batch.labels).mean(1)
        return own, losses, losses + self.weights.to(distilled) * distilled

    def remember(self, fleet: Fleet, task: int, order: Tensor) -> None:
        """Keep the models of a task that ended."""
        tensors = {**fleet.stack.parameters, **fleet.stack.buffers}
        self.teacher = {name: t.detach().clone() for name, t in tensors.items()}

    def keep(self, rows: Tensor) -> None:
        """Keep the runs in these rows."""
        self.weights = self.weights[rows]
        self.teacher = {name: to_stack_layout(tensor[rows]) for name, tensor in self.teacher.items()}

    def state_dict(self) -> PluginState:
        """Return the last task's models."""
        return PluginState(dict(self.teacher))

    def load_state_dict(self, fleet: Fleet, state: PluginState) -> None:
        """Continue with these models."""
        names = [*fleet.stack.parameters, *fleet.stack.buffers] if state.tensors else []
        self.teacher = {name: to_stack_layout(state.tensors[name].to(self.device)) for name in names}
