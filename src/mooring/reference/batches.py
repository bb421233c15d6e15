"""Batches of reference data, read, generated or labelled by the model, and the loss of a model on a batch."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mooring.errors import MooringError, check_whole
from mooring.observe.output_observer import find_outputs

Data = Iterable[Any] | Callable[[nn.Module], Any]
"""Batches, or a function from the model to a batch, such as sequences that the model generates."""

Outputs = Callable[[Any], Tensor]
"""A function that takes what a model returns and gives the tensor of its outputs."""

Loss = Callable[[nn.Module, Any], Tensor]
"""A function (model, batch) -> mean loss, a scalar tensor."""

LOSS_HINT = "give a loss(model, batch) that returns the mean loss"
"""What to do about a batch whose loss is not known; the end of several error messages."""


def iter_batches(data: Data, model: nn.Module, batches: int | None) -> Iterator[Any]:
    """Return an iterator over at most `batches` batches; a function is called exactly so often, without gradients."""
    if batches is not None:
        check_whole("batches", batches, 1)
    if isinstance(data, Tensor | str) or not (callable(data) or isinstance(data, Iterable)):
        raise MooringError(
            f"data of type {type(data).__name__} is not a collection of batches: give a loader, a list like [(x, y)], "
            "or a function from the model to a batch"
        )
    if isinstance(data, Iterable):
        return islice(data, batches)
    if batches is None:
        raise MooringError("data is a function, which has no number of batches: give batches=")
    generate = torch.no_grad()(data)
    return (generate(model) for _ in range(batches))


@torch.no_grad()
def add_sampled_labels(model: nn.Module, batch: Any, seed: int, outputs: Outputs | None = None) -> Any:
    """Add labels drawn from the model's prediction to a batch of inputs alone; return any other batch as it is.

    In expectation the squared score of such labels is the Fisher information at the present parameters, and the rise
    of their loss is the Kullback-Leibler divergence from the present model. So the model's predictions are kept,
    whether they are right or wrong.

    Args:
        model: a model whose outputs are logits, (samples, classes) or (samples, positions, classes).
        batch: a tensor of inputs, or a tuple or list of that tensor alone, as a `TensorDataset` of inputs gives it.
        seed: the seed of the draw; the global random state is not used.
        outputs: takes what the model returns and gives the tensor of its outputs; None is `find_outputs`.

    Example:
        >>> x, y = add_sampled_labels(nn.Identity(), torch.tensor([[0.0, 99.0], [99.0, 0.0]]), seed=0)
        >>> y
        tensor([1, 0])
    """
    if isinstance(batch, tuple | list) and len(batch) == 1:
        batch = batch[0]
    if not isinstance(batch, Tensor):
        return batch
    inputs = batch.to(device_of(model))
    logits = (outputs or find_outputs)(model(inputs))
    if logits.ndim not in (2, 3):
        raise MooringError(
            f"cannot draw labels from outputs of shape {tuple(logits.shape)}, which must be (samples, classes) or "
            f"(samples, positions, classes): give batches as (inputs, labels), or {LOSS_HINT}"
        )
    if logits.shape[-1] == 1:
        raise MooringError(f"cannot draw labels from a single output, which has no classes: {LOSS_HINT}")
    probabilities = logits.flatten(0, -2).float().softmax(-1).nan_to_num(nan=1.0)
    generator = torch.Generator(probabilities.device).manual_seed(seed)
    return inputs, torch.multinomial(probabilities, 1, generator=generator).view(logits.shape[:-1])


def to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on a device; it may be a tensor, or nested tuples, lists and mappings.

    Example:
        >>> to_device({"x": torch.zeros(2), "name": "old"}, torch.device("cpu"))
        {'x': tensor([0., 0.]), 'name': 'old'}
    """
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: to_device(part, device) for key, part in batch.items()}
    if isinstance(batch, tuple | list):
        return [to_device(part, device) for part in batch]
    return batch


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's first parameter; the CPU if it has none."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def default_loss(model: nn.Module, batch: Any, outputs: Outputs | None = None) -> Tensor:
    """Compute the default loss on a batch, which is moved to the model's device.

    For (inputs, labels) it is the mean cross entropy of the outputs, for sequences (samples, positions, classes) over
    the positions too, and for dense outputs (samples, classes, height, width) over the pixels; a label of -100 is
    ignored. A mapping is passed to the model as keyword arguments, and the model returns its `loss`, as models
    of transformers do.

    Args:
        model: the model.
        batch: (inputs, labels), or a mapping.
        outputs: takes what the model returns and gives the tensor of its outputs; None is `find_outputs`.

    Example:
        >>> default_loss(nn.Identity(), (torch.zeros(3, 2), torch.tensor([0, 1, 1])))
        tensor(0.6931)
    """
    batch = to_device(batch, device_of(model))
    if isinstance(batch, Mapping):
        returned = model(**batch)
        value = returned.get("loss") if isinstance(returned, Mapping) else getattr(returned, "loss", None)
        if not isinstance(value, Tensor):
            raise MooringError(f"the model returned no loss for a batch of {', '.join(batch)}: {LOSS_HINT}")
        return value
    if not isinstance(batch, tuple | list) or len(batch) != 2 or not all(isinstance(t, Tensor) for t in batch):
        raise MooringError(f"a batch of type {type(batch).__name__} is not (inputs, labels): {LOSS_HINT}")
    logits = (outputs or find_outputs)(model(batch[0]))
    if logits.ndim > 3:
        return functional.cross_entropy(logits, batch[1])
    return functional.cross_entropy(logits.flatten(0, -2), batch[1].flatten())


def scalar_loss(loss: Loss | None, model: nn.Module, batch: Any, outputs: Outputs | None = None) -> Tensor:
    """Compute the loss on a batch, by default `default_loss`; refuse one that is not a scalar tensor.

    Example:
        >>> scalar_loss(lambda model, x: model(x).mean(), nn.Identity(), torch.ones(2))
        tensor(1.)
    """
    value = loss(model, batch) if loss else default_loss(model, batch, outputs)
    if not isinstance(value, Tensor) or value.numel() != 1:
        what = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"type {type(value).__name__}"
        raise MooringError(f"loss(model, batch) returned {what}: it must return the mean loss, a scalar tensor")
    return value.squeeze()
