"""Values: regression, dense maps and reconstructions, compared by their squared difference in units of their error."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mooring.reference.kinds.kind import TINY, OutputKind, Stored, checked_rows, rows_of_outputs

PART_OF_VARIANCE = 0.1
"""The squared error of the original model, as a part of the variance of its outputs, where no targets show it."""

CONSTANT = 1e-12
"""An output whose s^2 is a smaller part of its mean square is constant, up to rounding, and gets the others' mean."""

SMALLEST_PART = 1e-3
"""s^2 is at least this part of an output's variance: a model that fits its reference exactly would allow no change."""


@dataclass(frozen=True, eq=False)
class Values(OutputKind):
    """Numbers, whose divergence is the mean over outputs of d^2 / (2 s^2), where d is what an output changed by.

    s^2 is the original model's squared error of that output where the reference has targets, else a tenth of the
    variance of the output. So it does not depend on units, and 0.1 nats mean that errors, which were s^2, grow by a
    fifth, whatever the number of outputs.

    Args:
        variance: s^2 of each output; by default as said.

    Example:
        >>> values = Values().fitted([torch.tensor([[0.0], [20.0]])], [torch.tensor([[1.0], [21.0]])])
        >>> values.variance
        tensor([1.])
        >>> values.divergence(values.store(torch.tensor([[5.0]])), torch.tensor([[5.1]]))
        tensor([[0.0050]])
    """

    variance: Tensor | None = None
    spread: Tensor | None = None
    name = "values"

    def fitted(self, outputs: Sequence[Tensor], labels: Sequence[Any]) -> "Values":
        """Return these values with s^2, and the variance of the outputs over all predictions."""
        rows = [rows_of_outputs(part).double() for part in outputs]
        every = torch.cat(rows)
        spread, size = every.var(0, correction=0), every.square().mean(0)
        if self.variance is not None:
            return Values(self.variance, spread.float())
        if all(is_target(part, y) for part, y in zip(outputs, labels, strict=True)):
            pairs = zip(rows, outputs, labels, strict=True)
            errors = [(row - rows_of_outputs(y.to(row.device).view_as(part))).square() for row, part, y in pairs]
            variance = torch.cat(errors).mean(0)
        else:
            variance = PART_OF_VARIANCE * spread
        variance = variance.maximum(SMALLEST_PART * spread)
        varies = variance > CONSTANT * size
        others = variance[varies].mean() if bool(varies.any()) else torch.ones_like(variance[0])
        return Values(torch.where(varies, variance, others).float(), spread.float())

    def store(self, outputs: Tensor) -> Stored:
        """Return the outputs, one row for each prediction."""
        return (rows_of_outputs(outputs).clone(),)

    def divergence(self, stored: Stored, outputs: Tensor) -> Tensor:
        """Return the mean over outputs of d^2 / (2 s^2), for each prediction."""
        old, new = checked_rows(stored[0], outputs)
        return ((new - old).square() / (2 * self._variance(new))).mean(-1).view(len(outputs), -1)

    def drawn_loss(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """Return a loss with the gradient of the squared error of targets that are drawn with the variance s^2."""
        rows = rows_of_outputs(outputs)
        noise = torch.randn(rows.shape, generator=generator, device=rows.device).to(rows)
        return (noise * rows / (self._variance(rows) * rows.shape[1]).sqrt()).sum() / len(rows)

    def _variance(self, rows: Tensor) -> Tensor:
        return rows.new_ones(1) if self.variance is None else self.variance.to(rows)

    @torch.no_grad()
    def loss_scale(self, outputs: Tensor, gradient: Tensor) -> Tensor:
        """Return the scale of a squared error whose residuals are as large as the outputs vary.

        The gradient of a * (y - t)^2 is 2 a (y - t), and that of the divergence at the same distance is (y - t) / s^2
        over the number of outputs n. The distance is not known, because a model shows no targets. On a new task it is
        about as far as the outputs of the old one are from each other.

        Example:
            >>> values = Values(torch.ones(2), torch.ones(2))
            >>> y = torch.zeros(6, 2, requires_grad=True)
            >>> (gradient,) = torch.autograd.grad(torch.nn.functional.mse_loss(y, torch.ones(6, 2)), y)
            >>> round(float(values.loss_scale(y, gradient)), 4)  # twice the variance
            2.0
        """
        g = rows_of_outputs(gradient).double()
        counts = g.any(-1).sum().clamp(min=1)
        spread = self._variance(g) if self.spread is None else self.spread.to(g)
        unit = spread.sqrt() / self._variance(g) / g.shape[1]
        return g.square().sum().sqrt() / (counts * unit.square().sum()).sqrt().clamp(min=TINY) * counts

    def state(self) -> dict[str, Any]:
        """Return what is needed to make this kind again."""
        return {"variance": self.variance, "spread": self.spread}


def is_target(outputs: Tensor, labels: Any) -> bool:
    """Return whether labels are targets of these outputs: floating-point numbers, one for each.

    Example:
        >>> is_target(torch.zeros(4, 1), torch.zeros(4)), is_target(torch.zeros(4, 2), torch.zeros(4))
        (True, False)
    """
    if not isinstance(labels, Tensor) or not labels.is_floating_point():
        return False
    single = outputs.ndim == 2 and outputs.shape[1] == 1 and labels.shape == outputs.shape[:1]
    column = labels.ndim == 2 and labels.shape[1] == 1 and labels.shape[:1] == outputs.shape
    return labels.shape == outputs.shape or single or column or is_map(outputs, labels)


def is_map(outputs: Tensor, labels: Tensor) -> bool:
    """Return whether labels are of dense outputs with a single channel, without a dimension for it.

    Example:
        >>> is_map(torch.zeros(4, 1, 8, 8), torch.zeros(4, 8, 8))
        True
    """
    return outputs.ndim > 2 and outputs.shape[1] == 1 and labels.shape == outputs.squeeze(1).shape
