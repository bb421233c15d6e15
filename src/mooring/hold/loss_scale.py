"""What the first steps of a task show of the user's loss: its scale, and what kind of outputs it is of.

The scale says by how many nats the loss counts one nat of the mean over predictions. Both are seen in a backward pass,
in the gradient of the outputs, whatever is done to the loss.
"""

import math
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mooring.distributed.dtensor import world_size
from mooring.errors import MooringError, UnheldWarning, warn
from mooring.hold.recent_inputs import TrainingHook
from mooring.reference.batches import Outputs
from mooring.reference.kinds import Classes, Labels, OutputKind, Values
from mooring.reference.kinds.evidence import GradientEvidence

OBSERVED_STEPS = 4
"""The number of steps at the beginning of a task in which the scale is observed; it is their mean."""

MOST_OUTPUTS = 1 << 22
"""Of more logits only those of some predictions are kept until the backward pass, because they take memory."""


class LossScale:
    """The scale of a loss, observed in the first steps of a task by a forward hook and the gradient of the outputs.

    It is 1 where the kind of the outputs cannot tell it, and under autocast to float16, where a scaler multiplies the
    loss.

    Args:
        outputs: takes what the model returns and gives its outputs; None is as their kind finds them.

    Attributes:
        value: the scale; 1 before anything was observed.
        steps: the number of steps that were observed.
        kind: what the outputs are taken for.
        checks: whether the first step says if they look like another kind; not if the user named it.
    """

    def __init__(self, outputs: Outputs | None = None) -> None:
        self.outputs = outputs
        self.value, self.steps = 1.0, 0
        self.kind: OutputKind = Classes()
        self.checks = False
        self._observed: list[Tensor] = []
        self._evidence: list[GradientEvidence] = []
        self._handle: Any = None

    @property
    def observes(self) -> bool:
        """Whether it observes the model, as in the first steps of a task."""
        return self._handle is not None

    def resume(self, value: float, steps: int) -> None:
        """Continue with what was observed in so many steps, at first with 1 and none."""
        self.unhook()
        self.value, self.steps, self._observed, self._evidence = value, steps, [], []

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
            outputs = (self.outputs or self.kind.find)(returned)
        except MooringError:
            return
        if not isinstance(outputs, Tensor) or not outputs.requires_grad or not outputs.ndim:
            return
        device = outputs.device.type
        scaled = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.float16
        part = SomePredictions.of(self.kind, outputs)
        values, ndim = part.take(outputs.detach()), outputs.ndim

        def observe(gradient: Tensor) -> None:
            own = part.take(gradient)
            if self.checks:
                self._evidence.append(GradientEvidence.of(values, gradient, own))
            if not scaled and not (ndim < 2 and isinstance(self.kind, Classes)):
                self._observed.append(self.kind.loss_scale(values, own) * part.share(gradient))

        outputs.register_hook(observe)  # type: ignore[no-untyped-call]

    def take(self) -> None:
        """Count a step; the backward passes before it are those of its micro-batches."""
        if self._evidence:
            evidence, self._evidence, self.checks = self._evidence, [], False
            better = [one.kind(self.kind) for one in evidence if one.parts or one.binary]
            if better and better[0] is not None and all(type(kind) is type(better[0]) for kind in better):
                warn_of_other_kind(self.kind, better[0])
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


def warn_of_other_kind(assumed: OutputKind, better: OutputKind) -> None:
    """Warn of outputs that the loss of the first step shows to be of another kind than the one that was inferred."""
    taken = f"the outputs are measured and distilled as {assumed.name}"
    if isinstance(better, Classes):
        where = "" if better.dimension is None else f" along dimension {better.dimension}"
        given = '"classes"' if better.dimension is None else f"mooring.kinds.Classes(dimension={better.dimension})"
        seen = f"the loss looks like a cross entropy over classes{where}: give attach kind={given}"
    elif isinstance(better, Labels):
        seen = 'the loss looks like a binary cross entropy of independent labels: give attach kind="labels"'
    elif isinstance(better, Values) and isinstance(assumed, Classes):
        seen = (
            'the loss is no cross entropy of them: give attach kind="values" for a regression or a reconstruction, '
            '"embedding" for vectors that are compared, or outputs= where the logits are elsewhere'
        )
    else:
        return
    warn(f"{taken}, but {seen}; kind={assumed.name!r} keeps it as it is, without this warning", UnheldWarning)


class SomePredictions:
    """Some predictions, spread over all, of logits that are too many to keep; else all of them.

    Args:
        kind: of the outputs.
        rows: the numbers of the predictions; None for all.

    Example:
        >>> all_of_them, some = (SomePredictions.of(Classes(), torch.zeros(1, 1).expand(n, 1 << 14)) for n in (4, 1000))
        >>> all_of_them.rows is None, len(some.rows), some.take(torch.zeros(1, 1).expand(1000, 1 << 14)).shape
        (True, 256, torch.Size([256, 16384]))
    """

    def __init__(self, kind: OutputKind, rows: Tensor | None) -> None:
        self.kind, self.rows = kind, rows

    @classmethod
    def of(cls, kind: OutputKind, outputs: Tensor) -> "SomePredictions":
        """Return those of outputs; all, if they are few or no logits of classes."""
        if outputs.numel() <= MOST_OUTPUTS or not isinstance(kind, Classes):
            return cls(kind, None)
        predictions = math.prod(kind.predictions(outputs))
        step = round(predictions * (5**0.5 - 1) / 2) | 1  # no position of a sequence is met more often than others
        wanted = max(1, MOST_OUTPUTS * predictions // outputs.numel())
        return cls(kind, torch.arange(wanted, device=outputs.device) * step % predictions)

    def take(self, outputs: Tensor) -> Tensor:
        """Return the rows of outputs, or of their gradient; unchanged if all are taken."""
        return outputs if self.rows is None else cast(Classes, self.kind).rows(outputs)[self.rows]

    def share(self, gradient: Tensor) -> Tensor | float:
        """Return how many times more predictions have a gradient than those that are taken."""
        if self.rows is None:
            return 1.0
        counted = cast(Classes, self.kind).rows(gradient).any(-1)
        return (counted.sum() / counted[self.rows].sum()).nan_to_num(0.0, posinf=0.0)
