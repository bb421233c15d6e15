"""The loss of a model on a batch: a function of the user's, or the default for the type of batch."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from mooring.errors import MooringError
from mooring.observe.output_observer import find_outputs
from mooring.reference.batches import LOSS_HINT, Outputs, device_of, to_device

__all__ = ["Loss", "default_loss", "scalar_loss"]

Loss = Callable[[nn.Module, Any], Tensor]
"""A function (model, batch) -> mean loss, a scalar tensor."""


def default_loss(outputs: Outputs | None = None) -> Loss:
    """Return the default loss function, which moves each batch to the model's device.

    For (inputs, labels) it is the mean cross entropy of the outputs, for sequences over the positions too; a label of
    -100 is ignored. A mapping is passed to the model as keyword arguments, and the model returns its `loss`, as models
    of transformers do.

    Args:
        outputs: takes what the model returns and gives the tensor of its outputs; None is `find_outputs`.

    Example:
        >>> import torch
        >>> default_loss()(nn.Identity(), (torch.zeros(3, 2), torch.tensor([0, 1, 1])))
        tensor(0.6931)
    """
    find = outputs or find_outputs

    def loss(model: nn.Module, batch: Any) -> Tensor:
        batch = to_device(batch, device_of(model))
        if isinstance(batch, Mapping):
            returned = model(**batch)
            value = returned.get("loss") if isinstance(returned, Mapping) else getattr(returned, "loss", None)
            if not isinstance(value, Tensor):
                raise MooringError(f"the model returned no loss for a batch of {', '.join(batch)}: {LOSS_HINT}")
            return value
        if not isinstance(batch, tuple | list) or len(batch) != 2 or not all(isinstance(t, Tensor) for t in batch):
            raise MooringError(f"a batch of type {type(batch).__name__} is not (inputs, labels): {LOSS_HINT}")
        return functional.cross_entropy(find(model(batch[0])).flatten(0, -2), batch[1].flatten())

    return loss


def scalar_loss(loss: Loss, model: nn.Module, batch: Any) -> Tensor:
    """Compute the loss on a batch; refuse one that is not a scalar tensor.

    Example:
        >>> import torch
        >>> scalar_loss(lambda model, x: model(x).mean(), nn.Identity(), torch.ones(2))
        tensor(1.)
    """
    value = loss(model, batch)
    if not isinstance(value, Tensor) or value.numel() != 1:
        what = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"type {type(value).__name__}"
        raise MooringError(f"loss(model, batch) returned {what}: it must return the mean loss, a scalar tensor")
    return value.squeeze()
