"""Classes: logits, compared by the Kullback-Leibler divergence of the softmax; of many the likeliest are stored.

The scale of the user's loss is seen in its gradient. That of a cross entropy of one prediction with the weight s, with
respect to its logits, is s * (p - t), where p are the probabilities and t is the label. So s is 1 / n for the mean over
n predictions, and 1 for their sum. The sum of s over all predictions of a step is the scale.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mooring.errors import MooringError
from mooring.observe.output_observer import (
    ZERO_SUM,
    at_least_float32,
    class_dimension,
    class_dimension_of_gradient,
)
from mooring.reference.kinds.kind import OutputKind, Stored, other_outputs

CHUNK = 1 << 24
"""The number of logits that are converted at a time."""


def coarse_log_probabilities(logits: Tensor, classes: Tensor) -> Tensor:
    """Return the log-probabilities of the classes of each row, and last that of all others together.

    Args:
        logits: (predictions, all classes), in any dtype.
        classes: (predictions, k).

    Returns:
        (predictions, k + 1), in at least float32.

    Example:
        >>> coarse_log_probabilities(torch.zeros(1, 4), torch.tensor([[2]])).exp()
        tensor([[0.2500, 0.7500]])
    """
    parts = [_coarse(at_least_float32(logits[part]), classes[part]) for part in chunks(logits)]
    return torch.cat([coarse - total for coarse, total in parts])


def likeliest(logits: Tensor, k: int) -> Tensor:
    """Return the k likeliest classes of each row, (predictions, k).

    Example:
        >>> likeliest(torch.tensor([[0.0, 2.0, 1.0]]), 2)
        tensor([[1, 2]])
    """
    return torch.cat([logits[part].topk(k, -1).indices for part in chunks(logits)])


def coarse_divergence(logits: Tensor, log_p: Tensor, classes: Tensor) -> Tensor:
    """Return sum(p * (log p - log q)) of each row, q of the logits, over the classes and the others as one.

    Args:
        logits: (predictions, all classes), in any dtype.
        log_p: (predictions, k + 1), as `coarse_log_probabilities` gives it.
        classes: (predictions, k).

    Example:
        >>> logits = torch.tensor([[0.0, 1.0, 0.0]])
        >>> coarse_divergence(logits, coarse_log_probabilities(logits, torch.tensor([[1]])), torch.tensor([[1]]))
        tensor([0.])
    """
    divergence: Tensor = _CoarseDivergence.apply(logits, log_p, classes)  # type: ignore[no-untyped-call]
    return divergence


class _CoarseDivergence(torch.autograd.Function):
    """d divergence / d logit is q * sum(p) - p for a class, and q * (sum(p) - p_others / q_others) for the others."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, log_p: Tensor, classes: Tensor) -> Tensor:
        values, totals, others = [], [], []
        for part in chunks(logits):
            coarse, total = _coarse(at_least_float32(logits[part]), classes[part])
            p = log_p[part].to(coarse)
            values.append(torch.where(p.isneginf(), 0.0, p.exp() * (p - (coarse - total))).sum(-1))
            totals.append(total)
            others.append(coarse[:, -1:] - total)
        ctx.save_for_backward(logits, log_p, classes, torch.cat(totals), torch.cat(others))
        return torch.cat(values)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        logits, log_p, classes, totals, others = ctx.saved_tensors
        result = torch.empty_like(logits)
        for part in chunks(logits):
            log_q, kept = at_least_float32(logits[part]) - totals[part], classes[part]
            p, log_p_others = log_p[part].to(log_q).exp(), log_p[part, -1:].to(log_q)
            ratio = torch.where(log_p_others.isneginf(), 0.0, (log_p_others - others[part]).exp())
            mass, q = p.sum(-1, keepdim=True), log_q.exp_()
            top = q.gather(-1, kept) * mass - p[:, :-1]
            result[part] = q.mul_(mass - ratio).scatter_(-1, kept, top).mul_(gradient[part, None])
        return result, None, None


def _coarse(logits: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits of these classes and, last, of the others as one class, and the logit of all classes as one."""
    total = logits.logsumexp(-1, keepdim=True)
    top = logits.gather(-1, classes)
    others = logits.scatter(-1, classes, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([top, others], -1), total


def chunks(logits: Tensor) -> Iterator[slice]:
    """Yield the rows of each chunk; without rows, one empty chunk."""
    rows = max(1, CHUNK // logits.shape[-1])
    for start in range(0, max(1, len(logits)), rows):
        yield slice(start, start + rows)


MAX_CLASSES = 1024
"""With more classes only the likeliest ones are stored, and the others as one."""

TOP_CLASSES = 64
"""The number of classes that are stored then."""


@dataclass(frozen=True)
class Classes(OutputKind):
    """Logits of classes, of which each prediction chooses one.

    Args:
        dimension: the dimension of the classes; None is 1 for (B, C) and dense outputs (B, C, height, width), and 2 for
            sequences (B, T, C).

    Example:
        >>> stored = Classes().store(torch.tensor([[0.0, 0.0]]))
        >>> Classes().divergence(stored, torch.tensor([[0.0, 1.0]]))
        tensor([[0.1201]])
    """

    dimension: int | None = None
    name = "classes"

    def check(self, outputs: Tensor) -> None:
        """Refuse outputs without a class dimension, or with a single class."""
        if outputs.ndim < 2 or outputs.ndim <= (self.dimension or 0) or outputs.shape[self._dimension(outputs)] < 2:
            raise MooringError(
                f"outputs of shape {tuple(outputs.shape)} are no distribution over classes: give attach a kind=, such "
                'as "labels" or "values", or a loss(model, batch), whose rise is measured instead'
            )

    def store(self, outputs: Tensor) -> Stored:
        """Return the log-probabilities, one row for each prediction, and the classes that they are of, None for all.

        Of many classes it is those of the likeliest, (predictions, TOP_CLASSES), and last that of the others.
        """
        logits = self.rows(outputs)
        if logits.shape[-1] <= MAX_CLASSES:
            return at_least_float32(logits).log_softmax(-1), None
        classes = likeliest(logits, TOP_CLASSES)
        return coarse_log_probabilities(logits, classes), classes

    def divergence(self, stored: Stored, outputs: Tensor) -> Tensor:
        """Return sum(p * (log p - log q)) of each prediction, p stored and q of the outputs.

        With the likeliest classes alone it is that of the coarser distribution, which is at most the whole one.
        """
        log_probabilities, classes = stored
        logits = self.rows(outputs)
        fits = classes is not None or logits.shape[-1] == log_probabilities.shape[-1]
        if len(logits) != len(log_probabilities) or not fits:
            raise other_outputs(outputs)
        if classes is not None:
            return coarse_divergence(logits, log_probabilities, classes).view(len(outputs), -1)
        q = at_least_float32(logits).log_softmax(-1)
        p = log_probabilities.to(q)
        return torch.where(p.isneginf(), 0.0, p.exp() * (p - q)).sum(-1).view(len(outputs), -1)

    def drawn_loss(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """Return the cross entropy of classes that are drawn from the softmax."""
        logits = self.rows(outputs)
        parts = torch.split(logits.detach(), max(1, CHUNK // logits.shape[-1]))
        labels = torch.cat([draw_classes(part, generator) for part in parts])
        return functional.cross_entropy(logits, labels)

    def predictions(self, outputs: Tensor) -> torch.Size:
        """Return the shape of the predictions, (samples, ...)."""
        return outputs.select(self._dimension(outputs), 0).shape

    def is_finite(self, stored: Stored) -> Tensor:
        """Return whether no log-probability is NaN or infinite; that of an impossible class is -inf."""
        total: Tensor = stored[0].sum()
        return ~(total.isnan() | total.isposinf())

    def rows(self, outputs: Tensor) -> Tensor:
        """Return outputs as (predictions, classes).

        Example:
            >>> Classes().rows(torch.zeros(2, 5, 3, 3)).shape, Classes(1).rows(torch.zeros(2, 3, 5)).shape
            (torch.Size([18, 5]), torch.Size([10, 3]))
        """
        return outputs.movedim(self._dimension(outputs), -1).flatten(0, -2)

    def _dimension(self, outputs: Tensor) -> int:
        return class_dimension(outputs) if self.dimension is None else self.dimension

    @torch.no_grad()
    def loss_scale(self, outputs: Tensor, gradient: Tensor) -> Tensor:
        """Return the scale of a loss from the gradient of its logits; 0 if it is no cross entropy.

        The label is the class with the lowest gradient, s * (p - 1), so that s = -gradient / (1 - p) there. Where the
        gradient is 0, nothing is predicted.

        Example:
            >>> logits = torch.randn(6, 3, requires_grad=True)
            >>> labels = torch.tensor([0, 1, 2, 0, 1, 2])
            >>> for reduction in ("mean", "sum"):
            ...     loss = functional.cross_entropy(logits, labels, reduction=reduction)
            ...     print(round(float(Classes().loss_scale(logits, *torch.autograd.grad(loss, logits))), 4))
            1.0
            6.0
        """
        dimension = class_dimension_of_gradient(gradient)
        gradient, logits = (t.movedim(dimension, -1).flatten(0, -2) for t in (gradient, outputs))
        sums = torch.zeros(5, dtype=torch.float64, device=logits.device)
        for part in chunks(logits):
            g, z = at_least_float32(gradient[part]), at_least_float32(logits[part])
            label = g.argmin(-1, keepdim=True)
            error = 1 - (z.gather(-1, label) - z.logsumexp(-1, keepdim=True)).exp()
            counts = g.any(-1, keepdim=True)
            terms = (-g.gather(-1, label) * counts, error * counts, counts, g.sum(-1).abs(), g.abs())
            sums += torch.stack([term.sum(dtype=torch.float64) for term in terms])
        pulls, errors, count, remainder, total = sums
        scale = pulls / errors * count
        return torch.where((remainder <= ZERO_SUM * total) & scale.isfinite(), scale, 0.0)

    def state(self) -> dict[str, Any]:
        """Return what is needed to make this kind again."""
        return {"dimension": self.dimension}


def draw_classes(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Draw a class for each row of logits, as `torch.multinomial` does, without its checks, for which the host waits.

    Example:
        >>> draw_classes(torch.tensor([[0.0, 99.0], [99.0, 0.0]]), torch.Generator())
        tensor([1, 0])
    """
    probabilities = logits.float().softmax(-1).nan_to_num_(nan=1.0)
    return probabilities.div_(torch.empty_like(probabilities).exponential_(generator=generator)).argmax(-1)
