"""Classes: logits, compared by the Kullback-Leibler divergence of the softmax; of many the likeliest are stored.

The scale of the user's loss is seen in its gradient. That of a cross entropy of one prediction with the weight s, with
respect to its logits, is s * (p - t), where p are the probabilities and t is the label. So s is 1 / n for the mean over
n predictions, and 1 for their sum. The sum of s over all predictions of a step is the scale.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

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


class LikeliestClasses(NamedTuple):
    """What is stored of predictions of many classes: the likeliest, the others as one, and some of the others.

    Attributes:
        log_p: the log-probabilities of the likeliest classes and, last, of the others together, (predictions, k + 1).
        classes: the likeliest classes, (predictions, k).
        drawn: others, drawn in proportion to their probability, (predictions, draws).
        log_tail: the log-probability of each of those among the others; NaN if it is none of them, by rounding.
    """

    log_p: Tensor
    classes: Tensor
    drawn: Tensor
    log_tail: Tensor

    @classmethod
    def of(cls, logits: Tensor, k: int, draws: int) -> "LikeliestClasses":
        """Return what is stored of logits, (predictions, all classes), in any dtype.

        Example:
            >>> stored = LikeliestClasses.of(torch.tensor([[0.0, 9.0, 0.0, 0.0]]), k=1, draws=2)
            >>> stored.classes, stored.log_tail.exp()
            (tensor([[1]], dtype=torch.int32), tensor([[0.3333, 0.3333]]))
        """
        generator = torch.Generator(logits.device).manual_seed(0)
        parts = [_likeliest(at_least_float32(logits[part]), k, draws, generator) for part in chunks(logits)]
        return cls(*map(torch.cat, zip(*parts, strict=True)))

    def divergence(self, logits: Tensor) -> Tensor:
        """Return an unbiased estimate of the divergence of each row, q of the logits, that is never negative.

        It is sum(p * log(p / q)) over the likeliest classes and the others as one, m, and m times that within the
        others, of which the mean of r - 1 - log(r) over drawn classes is an estimate, where r is the ratio of a class's
        probabilities among the others (http://joschu.net/blog/kl-approx.html). Where p and q are equal, it is 0 and so
        is its gradient.

        Example:
            >>> logits = torch.tensor([[0.0, 1.0, 0.0]])
            >>> LikeliestClasses.of(logits, k=1, draws=2).divergence(logits)
            tensor([0.])
        """
        divergence: Tensor = _Divergence.apply(logits, *self)  # type: ignore[no-untyped-call]
        return divergence


class _Divergence(torch.autograd.Function):
    """The divergence, with its gradient in parts.

    d divergence / d logit is q * sum(p) - p for a likely class, and q * (sum(p) - p_others / q_others * mean(r)) for
    the others, with p_others * (r - 1) / n more for each of the n drawn ones.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, log_p: Tensor, classes: Tensor, drawn: Tensor, log_tail: Tensor) -> Tensor:
        values, totals, others = [], [], []
        for part in chunks(logits):
            z, kept = at_least_float32(logits[part]), classes[part].long()
            coarse, total = _coarse(z, kept)
            p = log_p[part].to(coarse)
            value = torch.where(p.isneginf(), 0.0, p.exp() * (p - (coarse - total))).sum(-1)
            log_r = _log_ratio(z, coarse[:, -1:], drawn[part], log_tail[part])
            values.append(value + p[:, -1].exp() * (log_r.expm1() - log_r).mean(-1))
            totals.append(total)
            others.append(coarse[:, -1:] - total)
        ctx.save_for_backward(logits, log_p, classes, drawn, log_tail, torch.cat(totals), torch.cat(others))
        return torch.cat(values)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, log_p, classes, drawn, log_tail, totals, others = ctx.saved_tensors
        result = torch.empty_like(logits)
        for part in chunks(logits):
            z, kept, own = at_least_float32(logits[part]), classes[part].long(), drawn[part].long()
            log_r = _log_ratio(z, others[part] + totals[part], own, log_tail[part])
            log_q = z - totals[part]
            p, log_p_others = log_p[part].to(log_q).exp(), log_p[part, -1:].to(log_q)
            ratio = torch.where(log_p_others.isneginf(), 0.0, (log_p_others - others[part]).exp())
            ratio = ratio * (1 + log_r.expm1().mean(-1, keepdim=True))
            mass, q = p.sum(-1, keepdim=True), log_q.exp_()
            top = q.gather(-1, kept) * mass - p[:, :-1]
            more = p[:, -1:] * log_r.expm1() / log_r.shape[-1]
            whole = q.mul_(mass - ratio).scatter_add_(-1, own, more).scatter_(-1, kept, top)
            result[part] = whole.mul_(gradient[part, None])
        return result, None, None, None, None


def _likeliest(logits: Tensor, k: int, draws: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Return the parts of `LikeliestClasses` of a chunk; the draws are spread evenly over the probabilities."""
    classes = logits.topk(k, -1).indices
    coarse, total = _coarse(logits, classes)
    tail = (logits - coarse[:, -1:]).exp().scatter_(-1, classes, 0.0).nan_to_num_(0.0)
    sums = tail.cumsum(-1)
    start = torch.rand(len(logits), 1, generator=generator, device=logits.device)
    places = (start + torch.arange(draws, device=logits.device)) / draws * sums[:, -1:]
    drawn = torch.searchsorted(sums, places.to(sums), right=True).clamp_(max=logits.shape[-1] - 1)
    chosen = tail.gather(-1, drawn)
    log_tail = torch.where(chosen > 0, chosen.log(), torch.nan)
    return coarse - total, classes.int(), drawn.int(), log_tail


def _log_ratio(logits: Tensor, others: Tensor, drawn: Tensor, log_tail: Tensor) -> Tensor:
    """Return log(r) of the drawn classes, 0 where none was drawn; `others` is the logit of all others as one."""
    log_r = logits.gather(-1, drawn.long()) - others - log_tail.to(logits)
    return torch.where(log_tail.isnan(), 0.0, log_r)


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
"""So many classes are stored, of any number of predictions."""

MAX_STORED = 1 << 18
"""Of more classes all are stored if there are so few numbers in a batch, a megabyte, else only a part."""

TOP_CLASSES = 64
"""The number of likeliest classes that are stored then."""

DRAWN_CLASSES = 64
"""The number of others that are drawn: with 100 predictions the estimate is within about 2 % of a small divergence."""


LOG_OF_ONE = 1e-2
"""How far the sum of probabilities may be from 1, by rounding."""


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
        """Return the log-probabilities, one row for each prediction; of many classes as `LikeliestClasses`."""
        logits = self.rows(outputs)
        if logits.shape[-1] <= MAX_CLASSES or logits.numel() <= MAX_STORED:
            return (at_least_float32(logits).log_softmax(-1),)
        return LikeliestClasses.of(logits, TOP_CLASSES, DRAWN_CLASSES)

    def divergence(self, stored: Stored, outputs: Tensor) -> Tensor:
        """Return sum(p * (log p - log q)) of each prediction, p stored and q of the outputs; or an estimate of it."""
        logits, many = self.rows(outputs), len(stored) > 1
        if len(logits) != len(stored[0]) or not (many or logits.shape[-1] == stored[0].shape[-1]):
            raise other_outputs(outputs)
        if many:
            return LikeliestClasses(*stored).divergence(logits).view(len(outputs), -1)
        q = at_least_float32(logits).log_softmax(-1)
        p = stored[0].to(q)
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
        dimension = class_dimension_of_gradient(gradient_of_logits(outputs, gradient))
        gradient, logits = (t.movedim(dimension, -1).flatten(0, -2) for t in (gradient, outputs))
        gradient = gradient_of_logits(logits, gradient)
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


def gradient_of_logits(outputs: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient at the logits, where outputs are log-probabilities; else the gradient itself.

    That of a cross entropy is then -1 at the label alone. Passed through the log_softmax once more it is p - t.

    Example:
        >>> outputs = torch.tensor([[0.5, 0.5]]).log()
        >>> gradient_of_logits(outputs, torch.tensor([[-1.0, 0.0]]))
        tensor([[-0.5000,  0.5000]])
    """
    if outputs.ndim < 2 or outputs.shape[dimension := class_dimension(outputs)] < 2:
        return gradient
    if bool((outputs.amax(dimension) > LOG_OF_ONE).any()):  # cheap, and so for most logits
        return gradient
    p = at_least_float32(outputs).exp()
    if bool(((p.sum(dimension) - 1).abs() > LOG_OF_ONE).any()):
        return gradient
    return gradient - p.to(gradient) * gradient.sum(dimension, keepdim=True)


def draw_classes(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Draw a class for each row of logits, as `torch.multinomial` does, without its checks, for which the host waits.

    Example:
        >>> draw_classes(torch.tensor([[0.0, 99.0], [99.0, 0.0]]), torch.Generator())
        tensor([1, 0])
    """
    probabilities = logits.float().softmax(-1).nan_to_num_(nan=1.0)
    return probabilities.div_(torch.empty_like(probabilities).exponential_(generator=generator)).argmax(-1)
