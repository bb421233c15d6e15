"""What every kind of output has: a stored form, a divergence in nats, and a loss with its curvature."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from mooring.errors import MooringError
from mooring.observe.output_observer import at_least_float32, class_dimension, find_outputs

Stored = tuple[Any, ...]
"""What is stored of the outputs on a batch: tensors with a row for each prediction, and None for what is left out."""

TINY = torch.finfo(torch.float32).tiny
"""What keeps a division by 0 finite."""


class OutputKind(ABC):
    """What the outputs of a model are, and so how far those of two models are from each other.

    Attributes:
        name: the name in `attach(kind=...)`.
        splits: whether outputs have a row for each sample, so that the samples of a batch can be taken apart.
        find: takes what a model returned and gives its outputs, unless the user gives a function for that.
    """

    name: ClassVar[str]
    splits: ClassVar[bool] = True
    find: ClassVar[Any] = staticmethod(find_outputs)

    def fitted(self, outputs: Sequence[Any], labels: Sequence[Any]) -> "OutputKind":
        """Return the kind with what it needs to know of the original model's outputs and of their labels."""
        return self

    def check(self, outputs: Any) -> None:  # noqa: B027
        """Refuse outputs that are not of this kind."""

    @abstractmethod
    def store(self, outputs: Any) -> Stored:
        """Return what is stored of the original model's outputs."""

    @abstractmethod
    def divergence(self, stored: Stored, outputs: Any) -> Tensor:
        """Return the divergence of each prediction in nats, (samples, predictions of a sample), with a gradient."""

    @abstractmethod
    def drawn_loss(self, outputs: Any, generator: torch.Generator) -> Tensor:
        """Return the mean loss of targets that are drawn from the model's own prediction.

        In expectation the square of its gradient on a sample is the curvature of the divergence.
        """

    def predictions(self, outputs: Any) -> torch.Size | None:
        """Return the shape of the predictions, (samples, ...); None if it is not known."""
        rows: Tensor = outputs.select(class_dimension(outputs), 0) if outputs.ndim > 1 else outputs
        return rows.shape

    def is_finite(self, stored: Stored) -> Tensor:
        """Return whether all that is stored is finite, without waiting for the device."""
        first: Tensor = stored[0]
        return first.isfinite().all()

    def loss_scale(self, outputs: Tensor, gradient: Tensor) -> Tensor:
        """Return by how many nats a loss counts one nat of the mean over predictions; 0 if it cannot be told.

        Args:
            outputs: those of a training batch.
            gradient: of the loss with respect to them.
        """
        return torch.zeros((), dtype=torch.float64, device=outputs.device)

    def state(self) -> dict[str, Any]:
        """Return what is needed to make this kind again: plain values and tensors."""
        return {}


def rows_of_outputs(outputs: Tensor) -> Tensor:
    """Return outputs as (predictions, outputs of each), in at least float32.

    Example:
        >>> [rows_of_outputs(torch.zeros(shape)).shape for shape in ((4,), (4, 2), (4, 3, 2), (4, 3, 5, 5))]
        [torch.Size([4, 1]), torch.Size([4, 2]), torch.Size([12, 2]), torch.Size([100, 3])]
    """
    if outputs.ndim == 1:
        return at_least_float32(outputs[:, None])
    return at_least_float32(outputs.movedim(class_dimension(outputs), -1).flatten(0, -2))


def checked_rows(stored: Tensor, outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the stored rows and those of outputs in one dtype; refuse outputs of another shape."""
    rows = rows_of_outputs(outputs)
    if rows.shape != stored.shape:
        raise other_outputs(outputs)
    return stored.to(rows), rows


def other_outputs(outputs: Tensor) -> MooringError:
    """Return the error for outputs of another shape than those that are stored."""
    return MooringError(
        f"the model's outputs have shape {tuple(outputs.shape)}, unlike the stored outputs of the original "
        "model: keep the old outputs in the model, and add a head beside them"
    )
