"""Labels: independent logits, each of a label that is there or not, such as the tags of an image."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from mooring.reference.kinds.kind import TINY, OutputKind, Stored, checked_rows, rows_of_outputs

CONSTANT = {torch.float64: 1e-6, torch.float32: 1e-3}
"""How far apart the weights of a loss that are equal may be by rounding, as a part of the largest; else HALF."""

HALF = 0.1
"""The same in half precision."""

CERTAIN = 1e-2
"""A probability this near to 0 or 1 is no evidence, because its rounding hides the weight of the loss."""


@dataclass(frozen=True)
class Labels(OutputKind):
    """Independent logits, for multi-label classification and for a binary one with a single output.

    The divergence of a prediction is the sum over its labels of KL(Bernoulli(p) || Bernoulli(q)).

    Example:
        >>> stored = Labels().store(torch.tensor([[0.0, 2.0]]))
        >>> Labels().divergence(stored, torch.tensor([[0.0, 0.0]]))  # one of two labels has changed
        tensor([[0.3278]])
    """

    name = "labels"

    def store(self, outputs: Tensor) -> Stored:
        """Return the logits, one row for each prediction."""
        return (rows_of_outputs(outputs).clone(),)

    def divergence(self, stored: Stored, outputs: Tensor) -> Tensor:
        """Return the sum over labels of p * log(p / q) + (1 - p) * log((1 - p) / (1 - q)), for each prediction."""
        old, new = checked_rows(stored[0], outputs)
        on = old.sigmoid() * (functional.logsigmoid(old) - functional.logsigmoid(new))
        off = (-old).sigmoid() * (functional.logsigmoid(-old) - functional.logsigmoid(-new))
        return (on + off).sum(-1).view(len(outputs), -1)

    def drawn_loss(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """Return the cross entropy of labels that are drawn from the sigmoid."""
        logits = rows_of_outputs(outputs)
        drawn = torch.rand(logits.shape, generator=generator, device=logits.device)
        targets = (drawn < logits.detach().sigmoid()).to(logits)
        return functional.binary_cross_entropy_with_logits(logits, targets, reduction="sum") / len(logits)

    @torch.no_grad()
    def loss_scale(self, outputs: Tensor, gradient: Tensor) -> Tensor:
        """Return the sum over predictions of the mean weight of a label, if the loss is a binary cross entropy.

        Example:
            >>> logits, labels = torch.randn(6, 3, requires_grad=True), torch.ones(6, 3)
            >>> loss = functional.binary_cross_entropy_with_logits(logits, labels)  # the mean over labels, too
            >>> round(float(Labels().loss_scale(logits, *torch.autograd.grad(loss, logits))), 4)
            0.3333
        """
        weights, counts = weights_of_labels(rows_of_outputs(outputs), rows_of_outputs(gradient))
        scale = weights.sum(dtype=torch.float64) / counts.sum() * counts.any(-1).sum()
        return scale.nan_to_num(0.0, posinf=0.0)


def weights_of_labels(logits: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weight of each label in a binary cross entropy, 0 where it is not known, and where it is known.

    The gradient of a label with the weight s is s * p if it is absent, and -s * (1 - p) if it is there.
    """
    p = logits.sigmoid()
    error = torch.where(gradient > 0, p, 1 - p)
    counts = (gradient != 0) & (error > CERTAIN)
    return torch.where(counts, gradient.abs() / error.clamp(min=TINY), 0.0), counts


@torch.no_grad()
def is_binary_cross_entropy(logits: Tensor, gradient: Tensor) -> bool:
    """Return whether a gradient is that of a binary cross entropy: the weights of a label are equal in all samples.

    Present and absent labels may differ in weight, as with `pos_weight`.

    Example:
        >>> z, labels = torch.randn(8, 3, requires_grad=True), torch.eye(3)[torch.arange(8) % 3]
        >>> losses = functional.binary_cross_entropy_with_logits(z, labels), functional.mse_loss(z, labels)
        >>> [is_binary_cross_entropy(z.detach(), *torch.autograd.grad(loss, z)) for loss in losses]
        [True, False]
    """
    tolerance = CONSTANT.get(torch.promote_types(logits.dtype, gradient.dtype), HALF)
    if torch.float16 in (logits.dtype, gradient.dtype) or torch.bfloat16 in (logits.dtype, gradient.dtype):
        tolerance = HALF
    z, g = rows_of_outputs(logits), rows_of_outputs(gradient)
    weights, counts = weights_of_labels(z, g)
    p = z.sigmoid()
    error, compared = torch.where(g > 0, p, 1 - p), 0
    for sign in (g > 0, g < 0):
        known = counts & sign & (error < 1 - CERTAIN)
        largest = weights.masked_fill(~known, -torch.inf).amax(0)
        smallest = weights.masked_fill(~known, torch.inf).amin(0)
        several = known.sum(0) > 1
        if bool((several & (largest - smallest > tolerance * largest)).any()):
            return False
        errors = [error.masked_fill(~known, value) for value in (-torch.inf, torch.inf)]
        differ = errors[0].amax(0) - errors[1].amin(0) > CERTAIN  # equal weights of equal errors say nothing
        compared += int((known.sum(0) - 1).clamp(min=0)[differ].sum())
    return compared >= MIN_COMPARED


MIN_COMPARED = 4
"""The number of weights that have to equal another one: fewer could by chance."""
