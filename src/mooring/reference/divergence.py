"""The Kullback-Leibler divergence from a model's stored predictions; of many classes only the likeliest are stored."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mooring.errors import MooringError
from mooring.observe.output_observer import class_dimension

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


def at_least_float32(logits: Tensor) -> Tensor:
    """Return logits in float32, or in float64 if that is what they have.

    Example:
        >>> at_least_float32(torch.zeros(1, dtype=torch.bfloat16)).dtype
        torch.float32
    """
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


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
class StoredPredictions:
    """The log-probabilities that a model gave to a batch, one row for each prediction.

    Attributes:
        log_probabilities: (predictions, classes); of many classes those of the likeliest, and last that of the others.
        classes: the likeliest classes, (predictions, TOP_CLASSES); None if all are stored.
    """

    log_probabilities: Tensor
    classes: Tensor | None = None

    @classmethod
    def of(cls, outputs: Tensor) -> "StoredPredictions":
        """Return what is stored of outputs (samples, ..., classes) or (samples, classes, height, width).

        Example:
            >>> StoredPredictions.of(torch.zeros(2, 4)).log_probabilities.shape
            torch.Size([2, 4])
        """
        logits = rows_of_logits(outputs)
        if logits.shape[-1] <= MAX_CLASSES:
            return cls(at_least_float32(logits).log_softmax(-1))
        classes = likeliest(logits, TOP_CLASSES)
        return cls(coarse_log_probabilities(logits, classes), classes)

    def divergence(self, outputs: Tensor) -> Tensor:
        """Return the divergence of each prediction: sum(p * (log p - log q)), p stored and q of the outputs.

        With the likeliest classes alone it is that of the coarser distribution, which is at most the whole one.

        Example:
            >>> stored = StoredPredictions.of(torch.tensor([[0.0, 0.0]]))
            >>> stored.divergence(torch.tensor([[0.0, 0.0]])), stored.divergence(torch.tensor([[0.0, 1.0]]))
            (tensor([0.]), tensor([0.1201]))
        """
        logits = rows_of_logits(outputs)
        classes = self.log_probabilities.shape[-1]
        if len(logits) != len(self.log_probabilities) or (self.classes is None and logits.shape[-1] != classes):
            raise MooringError(
                f"the model's outputs have shape {tuple(outputs.shape)}, unlike the stored outputs of the original "
                "model: keep the old outputs in the model, and add a head beside them"
            )
        if self.classes is not None:
            return coarse_divergence(logits, self.log_probabilities, self.classes)
        q = at_least_float32(logits).log_softmax(-1)
        p = self.log_probabilities.to(q)
        return torch.where(p.isneginf(), 0.0, p.exp() * (p - q)).sum(-1)

    def rows(self, part: slice, samples: int) -> "StoredPredictions":
        """Return the predictions of some of so many samples.

        Example:
            >>> StoredPredictions.of(torch.zeros(2, 3, 4)).rows(slice(0, 1), samples=2).log_probabilities.shape
            torch.Size([3, 4])
        """
        own = (None if t is None else t.unflatten(0, (samples, -1))[part].flatten(0, 1) for t in vars(self).values())
        return StoredPredictions(*own)  # type: ignore[arg-type]

    def to(self, device: torch.device) -> "StoredPredictions":
        """Return the same on a device."""
        if self.log_probabilities.device == device:
            return self
        classes = None if self.classes is None else self.classes.to(device)
        return StoredPredictions(self.log_probabilities.to(device), classes)


def rows_of_logits(outputs: Tensor) -> Tensor:
    """Return outputs as (predictions, classes).

    Example:
        >>> rows_of_logits(torch.zeros(2, 5, 3, 3)).shape, rows_of_logits(torch.zeros(2, 3, 5)).shape
        (torch.Size([18, 5]), torch.Size([6, 5]))
    """
    return outputs.movedim(class_dimension(outputs), -1).flatten(0, -2)
