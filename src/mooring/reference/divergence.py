"""The Kullback-Leibler divergence from a model's stored predictions; of many classes only the likeliest are stored."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mooring.errors import MooringError
from mooring.observe.output_observer import class_dimension
from mooring.reference.coarse_divergence import at_least_float32, coarse_divergence, coarse_log_probabilities, likeliest

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
