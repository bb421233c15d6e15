"""The loss of a model on a batch: that of a function, or by what the batch is."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from mooring.errors import MooringError
from mooring.observe.output_observer import find_outputs
from mooring.reference.batches import HOW, Outputs, place_of, to_device

__all__ = ["Loss", "default_loss", "scalar_loss"]

Loss = Callable[[nn.Module, Any], Tensor]
"""The mean loss of a model on a batch, a scalar."""


def default_loss(outputs: Outputs | None = None) -> Loss:
    """The loss of a batch by what it is; it is moved to where the model is.

    (inputs, labels) has the mean cross entropy of the outputs, over positions too where they are sequences; a label of
    -100 does not count. A mapping is a model's keyword arguments, and the model returns its `loss`, as those of
    transformers do.

    Args:
        outputs: from what the model returns to the tensor of its outputs; None looks for it.

    Example:
        >>> import torch
        >>> default_loss()(nn.Identity(), (torch.zeros(3, 2), torch.tensor([0, 1, 1])))
        tensor(0.6931)
    """
    find = outputs or find_outputs

    def loss(model: nn.Module, batch: Any) -> Tensor:
        batch = to_device(batch, place_of(model))
        if isinstance(batch, Mapping):
            returned = model(**batch)
            found = returned.get("loss") if isinstance(returned, Mapping) else getattr(returned, "loss", None)
            if not isinstance(found, Tensor):
                raise MooringError(f"the model returned no loss for a batch of {', '.join(batch)}: {HOW}")
            return found
        if not isinstance(batch, tuple | list) or len(batch) != 2 or not all(isinstance(t, Tensor) for t in batch):
            raise MooringError(f"a batch of type {type(batch).__name__} is not (inputs, labels): {HOW}")
        return functional.cross_entropy(find(model(batch[0])).flatten(0, -2), batch[1].flatten())

    return loss


def scalar_loss(loss: Loss, model: nn.Module, batch: Any) -> Tensor:
    """The loss on a batch, refused where it is no scalar.

    Example:
        >>> import torch
        >>> scalar_loss(lambda model, x: model(x).mean(), nn.Identity(), torch.ones(2))
        tensor(1.)
    """
    found = loss(model, batch)
    if not isinstance(found, Tensor) or found.numel() != 1:
        what = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"type {type(found).__name__}"
        raise MooringError(f"loss(model, batch) returned {what}: it must return the mean loss, a scalar tensor")
    return found.squeeze()
