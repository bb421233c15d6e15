"""Mixtures of a small reference's inputs: more places at which to compare a model with the original one."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mooring.reference.batches import is_pair

Inputs = Tensor | dict[str, Tensor]
"""The inputs of a batch: one tensor, or keyword arguments."""

LABELS = "labels"
"""The keyword argument that is no input."""


class MixedBatches(Sequence[Any]):
    """Batches, and after them convex mixtures of their inputs, which are made again whenever they are read.

    Mixture i of a batch is w * x + (1 - w) * y, with w uniform between 0 and 1 for each sample x of the batch, and y
    a sample drawn from all batches. The draws are seeded by i and the number of the batch.

    Args:
        batches: the batches.
        rounds: the number of mixtures of each batch; 0 for inputs that cannot be mixed, such as tokens.

    Example:
        >>> batches = MixedBatches([torch.zeros(2, 3), torch.ones(2, 3)], rounds=4)
        >>> len(batches), batches[1].shape, batches[2].shape
        (10, torch.Size([2, 3]), torch.Size([2, 3]))
    """

    def __init__(self, batches: Sequence[Any], rounds: int) -> None:
        self.own = list(batches)
        self.rounds = rounds if _can_be_mixed(self.own) else 0
        self._sizes = [count_inputs(batch) for batch in self.own] if self.rounds else []

    def __len__(self) -> int:
        return len(self.own) * (1 + self.rounds)

    def __getitem__(self, index: Any) -> Any:
        """Return a batch, or the inputs of a mixture."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        if index < len(self.own):
            return self.own[index]
        drawn = draw_mixture(index, self._sizes)
        samples, others = _inputs_of(self.own[index % len(self.own)]), _inputs_of(self.own[drawn.other])
        rows, weights = drawn.rows, drawn.weights
        if isinstance(samples, Tensor):
            assert isinstance(others, Tensor)
            return _mix(samples, others, rows, weights)
        assert isinstance(others, dict)
        return {name: _mix(samples[name], others[name], rows, weights) for name in samples}


class Mixture(NamedTuple):
    """How the samples of a batch are mixed.

    Attributes:
        other: the number of the batch that they are mixed with.
        rows: its sample for each of them.
        weights: the weight of their own.
    """

    other: int
    rows: Tensor
    weights: Tensor


def draw_mixture(index: int, sizes: Sequence[int]) -> Mixture:
    """Draw a mixture of the batch `index % len(sizes)`, seeded by the index; `sizes` are those of all batches."""
    generator = torch.Generator().manual_seed(index)
    other, count = int(torch.randint(len(sizes), (), generator=generator)), sizes[index % len(sizes)]
    rows = torch.randint(sizes[other], (count,), generator=generator)
    return Mixture(other, rows, torch.rand(count, generator=generator))


def count_inputs(batch: Any) -> int:
    """Return the number of samples of a batch; 0 if its inputs cannot be mixed.

    Example:
        >>> count_inputs((torch.zeros(4, 2), torch.zeros(4))), count_inputs(torch.zeros(4, 2, dtype=torch.int64))
        (4, 0)
    """
    inputs = _inputs_of(batch)
    return 0 if inputs is None else _count(inputs)


def _mix(samples: Tensor, others: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
    """Return w * x + (1 - w) * y for each sample x and the row y of the others that was drawn for it.

    Example:
        >>> _mix(torch.zeros(1, 2), torch.ones(3, 2), torch.tensor([2]), torch.tensor([0.25]))
        tensor([[0.7500, 0.7500]])
    """
    w = _moved(weights, samples.device).to(samples.dtype).view(-1, *[1] * (samples.ndim - 1))
    return w * samples + (1 - w) * others[_moved(rows, others.device)]  # not lerp, which rounds otherwise on a GPU


def _moved(numbers: Tensor, device: torch.device) -> Tensor:
    """Return numbers of the host on a device, without waiting for it."""
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers.to(device)


def _can_be_mixed(batches: Sequence[Any]) -> bool:
    """Return whether all inputs are tensors of floating-point numbers, alike but for the number of samples."""
    inputs = [_inputs_of(batch) for batch in batches]
    shapes = {None if part is None else _shapes(part) for part in inputs}
    return len(shapes) == 1 and None not in shapes


def _inputs_of(batch: Any) -> Any:
    """Return the inputs of a batch; None if they are no floating-point tensors with a dimension of samples."""
    alone = isinstance(batch, tuple | list) and len(batch) == 1
    inputs = batch[0] if alone or is_pair(batch) else batch
    if isinstance(inputs, Mapping):
        inputs = {name: part for name, part in inputs.items() if name != LABELS}
    parts = list(inputs.values()) if isinstance(inputs, dict) else [inputs]
    floating = [isinstance(part, Tensor) and part.is_floating_point() and part.ndim > 1 for part in parts]
    return inputs if parts and all(floating) else None


def _shapes(inputs: Inputs) -> tuple[Any, ...]:
    if isinstance(inputs, Tensor):
        return tuple(inputs.shape[1:]), inputs.dtype, inputs.device
    return tuple((name, _shapes(part)) for name, part in inputs.items())


def _count(inputs: Inputs) -> int:
    return len(inputs if isinstance(inputs, Tensor) else next(iter(inputs.values())))
