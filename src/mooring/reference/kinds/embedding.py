"""Embeddings: vectors that are compared with each other, such as those of a retrieval index."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from mooring.errors import MooringError
from mooring.reference.kinds.classes import draw_classes
from mooring.reference.kinds.kind import OutputKind, Stored, checked_rows, rows_of_outputs

INDEXED = 256
"""The number of embeddings of the reference that others are compared with."""

PART_OF_ENTROPY = 0.5
"""The entropy of the original model's similarities at the default temperature, as a part of the largest."""

BISECTIONS = 40
"""The number of bisections in the search for the temperature."""


@dataclass(frozen=True, eq=False)
class Embedding(OutputKind):
    """Vectors, whose divergence is KL(old || new) between the softmax of their similarities to an index.

    The index is fixed: up to 256 embeddings of the reference by the original model. So a new embedding has to find the
    same neighbours in the old index.

    Args:
        temperature: what similarities are divided by, such as that of training; by default such that the entropy of the
            original model's similarities is half of the largest.
        similarity: "cosine" or "dot".
        index: the embeddings to compare with, (vectors, dimensions).

    Example:
        >>> kind = Embedding(temperature=0.5).fitted([torch.eye(3)], [None])
        >>> kind.divergence(kind.store(torch.eye(3)), torch.eye(3).roll(1, 0))[0]
        tensor([1.3610])
    """

    temperature: float | None = None
    similarity: Literal["cosine", "dot"] = "cosine"
    index: Tensor | None = None
    name = "embedding"

    def __post_init__(self) -> None:
        if self.similarity not in ("cosine", "dot"):
            raise MooringError(f"similarity={self.similarity!r} is not allowed: give 'cosine' or 'dot'")
        if self.temperature is not None and not self.temperature > 0:
            raise MooringError(f"temperature={self.temperature!r} is not allowed: give a number above 0")

    def check(self, outputs: Tensor) -> None:
        """Refuse single numbers."""
        if outputs.ndim < 2 or outputs.shape[-1] < 2:
            raise MooringError(
                f"outputs of shape {tuple(outputs.shape)} are no embeddings, which are vectors: give outputs= that "
                'takes the vectors from what the model returns, or kind="values"'
            )

    def fitted(self, outputs: Sequence[Tensor], labels: Sequence[Any]) -> "Embedding":
        """Return this kind with an index and a temperature."""
        rows = torch.cat([_rows(part) for part in outputs])
        index = self.index
        if index is None:
            chosen = torch.linspace(0, len(rows) - 1, min(INDEXED, len(rows))).round().long()
            index = rows[chosen.to(rows.device)].float()
        kind = Embedding(self.temperature, self.similarity, index)
        if self.temperature is not None or len(index) < 2:
            return kind
        return Embedding(kind._default_temperature(rows), self.similarity, index)

    def store(self, outputs: Tensor) -> Stored:
        """Return the embeddings, one row for each prediction."""
        return (_rows(outputs).clone(),)

    def divergence(self, stored: Stored, outputs: Tensor) -> Tensor:
        """Return the sum over the index of p * log(p / q), for each embedding."""
        old, new = checked_rows(stored[0], _last(outputs))
        log_p, log_q = (self.similarities(rows).log_softmax(-1) for rows in (old, new))
        return (log_p.exp() * (log_p - log_q)).sum(-1).view(len(outputs), -1)

    def drawn_loss(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """Return the cross entropy of neighbours that are drawn from the softmax of the similarities."""
        similarities = self.similarities(_rows(outputs))
        return functional.cross_entropy(similarities, draw_classes(similarities.detach(), generator))

    def predictions(self, outputs: Tensor) -> torch.Size:
        """Return the shape of the embeddings, (samples, ...)."""
        return outputs.shape[:-1]

    def similarities(self, rows: Tensor) -> Tensor:
        """Return the similarities of embeddings to the index over the temperature, (embeddings, index)."""
        index = rows if self.index is None else self.index.to(rows)
        if self.similarity == "cosine":
            rows, index = functional.normalize(rows, dim=-1), functional.normalize(index, dim=-1)
        return rows @ index.T / (self.temperature or 1.0)

    def _default_temperature(self, rows: Tensor) -> float:
        """Return the temperature at which the mean entropy is half of the largest, by bisection of its logarithm."""
        similarities = Embedding(1.0, self.similarity, self.index).similarities(rows.double())
        largest = torch.tensor(float(similarities.shape[1])).log()
        spread = float((similarities.amax(-1) - similarities.amin(-1)).mean())
        if not spread > 0:
            return 1.0
        low, high = 1e-4 * spread, 1e4 * spread
        for _ in range(BISECTIONS):
            middle = math.sqrt(low * high)
            log_p = (similarities / middle).log_softmax(-1)
            entropy = -(log_p.exp() * log_p).sum(-1).mean()
            low, high = (middle, high) if entropy < PART_OF_ENTROPY * largest else (low, middle)
        return math.sqrt(low * high)

    def state(self) -> dict[str, Any]:
        """Return what is needed to make this kind again."""
        return {"temperature": self.temperature, "similarity": self.similarity, "index": self.index}


def _last(outputs: Tensor) -> Tensor:
    """Return embeddings as (embeddings, dimensions)."""
    return outputs.flatten(0, -2)


def _rows(outputs: Tensor) -> Tensor:
    """Return embeddings as (embeddings, dimensions), in at least float32."""
    return rows_of_outputs(_last(outputs))
