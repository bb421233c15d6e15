"""The scale of the user's loss: by how many nats it counts one nat of the mean cross entropy of a batch.

The gradient of a cross entropy of one prediction with the weight s, with respect to its logits, is s * (p - t), where p
are the probabilities and t is the label. So s is seen in a backward pass, whatever is done to the loss: it is 1 / n for
the mean over n predictions, and 1 for their sum. The sum of s over all predictions of a step is the scale.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mooring.distributed.dtensor import world_size
from mooring.errors import MooringError
from mooring.hold.recent_inputs import TrainingHook
from mooring.observe.output_observer import (
    ZERO_SUM,
    class_dimension,
    class_dimension_of_gradient,
    find_outputs,
)
from mooring.reference.batches import Outputs
from mooring.reference.divergence import at_least_float32, chunks

OBSERVED_STEPS = 4
"""The number of steps at the beginning of a task in which the scale is observed; it is their mean."""

MOST_OUTPUTS = 1 << 22
"""Of more outputs only those of some predictions are kept until the backward pass, because they take memory."""


class LossScale:
    """The scale of a loss, observed in the first steps of a task by a forward hook and the gradient of the outputs.

    It is 1 where the loss is no cross entropy, and under autocast to float16, where a scaler multiplies the loss.

    Args:
        outputs: takes what the model returns and gives the tensor of its outputs; None is `find_outputs`.

    Attributes:
        value: the scale; 1 before anything was observed.
        steps: the number of steps that were observed.
    """

    def __init__(self, outputs: Outputs | None = None) -> None:
        self.find_outputs = outputs or find_outputs
        self.value, self.steps = 1.0, 0
        self._observed: list[Tensor] = []
        self._handle: Any = None

    @property
    def observes(self) -> bool:
        """Whether it observes the model, as in the first steps of a task."""
        return self._handle is not None

    def resume(self, value: float, steps: int) -> None:
        """Continue with what was observed in so many steps, at first with 1 and none."""
        self.unhook()
        self.value, self.steps, self._observed = value, steps, []

    def hook(self, model: nn.Module) -> None:
        """Observe the outputs of a model, until enough steps are observed."""
        if self.steps < OBSERVED_STEPS and not self.observes:
            self._handle = model.register_forward_hook(TrainingHook(self.after_forward))

    def unhook(self) -> None:
        """Observe nothing any more."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def after_forward(self, module: nn.Module, args: Any, returned: Any) -> None:
        """Observe the gradient of the outputs, if this pass may be of one of the first steps."""
        try:
            outputs = self.find_outputs(returned)
        except MooringError:
            return
        kind = outputs.device.type
        scaled = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16
        if outputs.requires_grad and outputs.ndim > 1 and not scaled:
            rows = rows_to_read(outputs)
            logits = outputs.detach() if rows is None else predictions_of(outputs.detach())[rows]

            def observe(gradient: Tensor) -> None:
                self._observed.append(scale_of(logits, gradient, rows))

            outputs.register_hook(observe)  # type: ignore[no-untyped-call]

    def take(self) -> None:
        """Count a step; the backward passes before it are those of its micro-batches."""
        if not self._observed:
            return
        total = torch.stack(self._observed).sum()
        if world_size() > 1:
            dist.all_reduce(total)
            total /= world_size()
        observed = float(f"{float(total):.3g}") if total > 0 else 1.0  # without the rounding of logits
        self._observed = []
        self.value += (observed - self.value) / (self.steps + 1)
        self.steps += 1
        if self.steps == OBSERVED_STEPS:
            self.unhook()


def rows_to_read(outputs: Tensor) -> Tensor | None:
    """Return the numbers of the predictions that the scale is read from, spread over all; None for all of them.

    Example:
        >>> rows_to_read(torch.zeros(4, 10)) is None, len(rows_to_read(torch.zeros(1, 1).expand(1000, 1 << 14)))
        (True, 256)
    """
    if outputs.numel() <= MOST_OUTPUTS:
        return None
    predictions = outputs.numel() // outputs.shape[class_dimension(outputs)]
    wanted = max(1, MOST_OUTPUTS * predictions // outputs.numel())
    step = round(predictions * (5**0.5 - 1) / 2) | 1  # no position of a sequence is met more often than others
    return torch.arange(wanted, device=outputs.device) * step % predictions


def predictions_of(outputs: Tensor, dimension: int | None = None) -> Tensor:
    """Return outputs with a row for each prediction, and the classes last."""
    return outputs.movedim(class_dimension(outputs) if dimension is None else dimension, -1).flatten(0, -2)


@torch.no_grad()
def scale_of(logits: Tensor, gradient: Tensor, rows: Tensor | None = None) -> Tensor:
    """Return the scale of a loss from the gradient of its logits; 0 if it is no cross entropy.

    The label is the class with the lowest gradient, s * (p - 1), so that s = -gradient / (1 - p) there.

    Args:
        logits: the outputs, or the predictions in these rows.
        gradient: of all outputs; where it is 0, nothing is predicted.
        rows: the numbers of the predictions to read; None for all.

    Example:
        >>> logits = torch.randn(6, 3, requires_grad=True)
        >>> labels = torch.tensor([0, 1, 2, 0, 1, 2])
        >>> for reduction in ("mean", "sum"):
        ...     loss = nn.functional.cross_entropy(logits, labels, reduction=reduction)
        ...     print(round(float(scale_of(logits, *torch.autograd.grad(loss, logits))), 4))
        1.0
        6.0
    """
    dimension = class_dimension_of_gradient(gradient)
    if rows is not None and dimension != class_dimension(gradient):
        return gradient.new_zeros((), dtype=torch.float64)
    if rows is None:
        logits = predictions_of(logits, dimension)
    gradient = predictions_of(gradient, dimension)
    count = gradient.any(-1).sum()
    if rows is not None:
        gradient = gradient[rows]
    sums = torch.zeros(4, dtype=torch.float64, device=logits.device)
    for part in chunks(logits):
        g, z = at_least_float32(gradient[part]), at_least_float32(logits[part])
        label = g.argmin(-1, keepdim=True)
        error = 1 - (z.gather(-1, label) - z.logsumexp(-1, keepdim=True)).exp()
        terms = (-g.gather(-1, label), error * g.any(-1, keepdim=True), g.sum(-1).abs(), g.abs())
        sums += torch.stack([term.sum(dtype=torch.float64) for term in terms])
    pulls, errors, remainder, total = sums
    scale = pulls / errors * count
    return torch.where((remainder <= ZERO_SUM * total) & scale.isfinite(), scale, 0.0)
