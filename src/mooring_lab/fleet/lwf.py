"""Learning without forgetting: old heads keep the outputs that the last task's model has on the new task's inputs.

Z. Li, D. Hoiem: Learning without forgetting, ECCV 2016. No old data is needed. The loss of a step is that of the task
plus the strength times the distillation loss, summed over the old heads. All parameters learn from both. The paper
first trains the new head alone; here it starts from the head before it, as with every method.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from mooring_lab.fleet.data import Batch
from mooring_lab.fleet.stack.stack import Stack, to_stack_layout
from mooring_lab.model.spec import RunSpec
from mooring_lab.streams.stream import Stream

Tensors = dict[str, Tensor]


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


class LearningWithoutForgetting:
    """The last task's model of every run, and the loss that its outputs add to the next task's.

    Args:
        temperature: of the distillation.
        specs: the runs; their strengths are the weights of the added loss.
        stream: the tasks.
        device: of the runs.

    Attributes:
        teacher: parameters and buffers of the last task's models, by name; empty in the first task.
        weights: of shape (runs,).
        old_heads: the heads of past tasks.
        outputs, old_outputs: the number of outputs that a head has in this task, and in the one before.
    """

    def __init__(self, temperature: float, specs: Sequence[RunSpec], stream: Stream, device: torch.device) -> None:
        self.temperature, self.stream, self.device = temperature, stream, device
        self.teacher: Tensors = {}
        self.old_heads: tuple[int, ...] = ()
        self.outputs = self.old_outputs = stream.outputs
        self.set_strengths(specs)

    def set_strengths(self, specs: Sequence[RunSpec]) -> None:
        """Give each run the strength of its spec."""
        strengths = [spec.strength or 0.0 for spec in specs]
        self.weights = torch.tensor(strengths, dtype=torch.float64, device=self.device)

    def remember(self, stack: Stack) -> None:
        """Keep the models of a task that ended."""
        self.teacher = {name: t.detach().clone() for name, t in {**stack.parameters, **stack.buffers}.items()}

    def start_task(self, task: int) -> None:
        """Find the heads of the tasks before this one, and the outputs that they had."""
        self.old_heads = tuple(dict.fromkeys(self.stream.head(number) for number in range(task)))
        self.outputs, self.old_outputs = (self.stream.grown_outputs(number) for number in (task, max(0, task - 1)))

    def losses(self, stack: Stack, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the task's mean loss and the weighted distillation loss of each run, both of shape (runs,).

        Args:
            stack: the runs, in training mode; the teachers are in evaluation mode.
            batch: of the task, with one head.
        """
        assert isinstance(batch.head, int)
        logits = stack(batch.x, (*self.old_heads, batch.head), train=True)
        with torch.no_grad(), stack.replaced_by(self.teacher):
            targets = stack(batch.x, self.old_heads)
        own, old = logits[:, :, -1, : self.outputs], logits[:, :, :-1, : self.old_outputs]
        losses = cross_entropy(own.flatten(0, 1), batch.labels.flatten(), reduction="none")
        distilled = distillation_loss(old, targets[..., : self.old_outputs], self.temperature)
        return losses.view_as(batch.labels).mean(1), self.weights.to(distilled) * distilled

    def keep(self, rows: Tensor) -> None:
        """Keep only the runs in these rows."""
        self.weights = self.weights[rows]
        self.teacher = {name: to_stack_layout(tensor[rows]) for name, tensor in self.teacher.items()}
