"""The divergence over the likeliest classes and all others as one, for vocabularies whose logits fill the memory.

Logits are converted to float32 for some predictions at a time, in the backward pass too, so that neither pass has a
copy of all of them.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

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
    parts = [_coarse(at_least_float32(logits[part]), classes[part]) for part in _chunks(logits)]
    return torch.cat([coarse - total for coarse, total in parts])


def likeliest(logits: Tensor, k: int) -> Tensor:
    """Return the k likeliest classes of each row, (predictions, k).

    Example:
        >>> likeliest(torch.tensor([[0.0, 2.0, 1.0]]), 2)
        tensor([[1, 2]])
    """
    return torch.cat([logits[part].topk(k, -1).indices for part in _chunks(logits)])


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
        for part in _chunks(logits):
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
        for part in _chunks(logits):
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


def _chunks(logits: Tensor) -> Iterator[slice]:
    """Yield the rows of each chunk; without rows, one empty chunk."""
    rows = max(1, CHUNK // logits.shape[-1])
    for start in range(0, max(1, len(logits)), rows):
        yield slice(start, start + rows)
