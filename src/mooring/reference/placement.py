"""Where the batches of a gauge are kept: on the model's device if they are small, else in pinned memory of the host."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mooring.reference.batches import map_tensors, to_device

RESIDENT_PART = 0.005
"""The part of a GPU's memory that the batches of one gauge may take there."""


def placed(batches: Sequence[Any], device: torch.device) -> list[Any]:
    """Return batches that `to_device` copies without a wait: on the device, or pinned if they are too large for it.

    Example:
        >>> placed([torch.zeros(2)], torch.device("cpu"))
        [tensor([0., 0.])]
    """
    if device.type != "cuda":
        return list(batches)
    size = sum(t.nbytes for batch in batches for t in tensors_in(batch) if t.device != device)
    if size <= RESIDENT_PART * torch.cuda.get_device_properties(device).total_memory:
        return [to_device(batch, device) for batch in batches]
    return [map_tensors(batch, lambda t: t.pin_memory() if t.device.type == "cpu" else t) for batch in batches]


def tensors_in(batch: Any) -> list[Tensor]:
    """Return the tensors of a batch.

    Example:
        >>> [t.shape for t in tensors_in({"x": torch.zeros(2), "y": [torch.zeros(3), "old"]})]
        [torch.Size([2]), torch.Size([3])]
    """
    tensors: list[Tensor] = []
    map_tensors(batch, lambda t: tensors.append(t) or t)  # type: ignore[func-returns-value]
    return tensors
