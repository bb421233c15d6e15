"""Batches of what a model knows: read, made with the model, or labelled by it where they have no labels."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from mooring.errors import MooringError, check_whole
from mooring.observe.output_observer import find_outputs

__all__ = ["HOW", "Data", "Outputs", "batches_of", "labelled", "place_of", "to_device"]

Data = Iterable[Any] | Callable[[nn.Module], Any]
"""Batches, or a function from the model to a batch, such as one of sequences that it generates."""

Outputs = Callable[[Any], Tensor]
"""From what a model returns to the tensor of its outputs."""

HOW = "give a loss(model, batch) that returns the mean loss"
"""What to do about a batch that says nothing about its loss."""


def batches_of(data: Data, model: nn.Module, batches: int | None) -> Iterator[Any]:
    """At most so many batches of data, or exactly so many where a function makes them, without gradients."""
    if batches is not None:
        check_whole("batches", batches, 1)
    if isinstance(data, Tensor | str) or not (callable(data) or isinstance(data, Iterable)):
        raise MooringError(
            f"data of type {type(data).__name__} is not a collection of batches: give a loader, a list like [(x, y)], "
            "or a function that makes a batch with the model"
        )
    if isinstance(data, Iterable):
        return islice(data, batches)
    if batches is None:
        raise MooringError("a function makes any number of batches: say how many with batches=")
    return (_made(data, model) for _ in range(batches))


@torch.no_grad()
def _made(data: Callable[[nn.Module], Any], model: nn.Module) -> Any:
    return data(model)


@torch.no_grad()
def labelled(model: nn.Module, batch: Any, seed: int, outputs: Outputs | None = None) -> Any:
    """A batch of inputs alone, with labels drawn from the model's own prediction; any other batch as it is.

    The squared score of such labels is, in expectation, the Fisher information at the model as it is, and the rise of
    their loss the Kullback-Leibler divergence from it: what is kept is what the model says, right or wrong.

    Args:
        model: whose outputs are logits, (samples, classes) or (samples, positions, classes).
        batch: a tensor of inputs, or it alone in a tuple or list, as a `TensorDataset` of inputs gives it.
        seed: of the draw, which leaves the global random state alone.
        outputs: from what the model returns to the tensor of its outputs; None looks for it.

    Example:
        >>> x, y = labelled(nn.Identity(), torch.tensor([[0.0, 99.0], [99.0, 0.0]]), seed=0)
        >>> y
        tensor([1, 0])
    """
    if isinstance(batch, tuple | list) and len(batch) == 1:
        batch = batch[0]
    if not isinstance(batch, Tensor):
        return batch
    inputs = batch.to(place_of(model))
    logits = (outputs or find_outputs)(model(inputs))
    if logits.ndim not in (2, 3):
        raise MooringError(
            f"cannot draw labels from outputs of shape {tuple(logits.shape)}, which should be (samples, classes) or "
            f"(samples, positions, classes): give batches as (inputs, labels), or {HOW}"
        )
    if logits.shape[-1] == 1:
        raise MooringError(f"cannot draw labels from one output, which has no classes to draw from: {HOW}")
    chances = logits.flatten(0, -2).float().softmax(-1).nan_to_num(nan=1.0)
    generator = torch.Generator(chances.device).manual_seed(seed)
    return inputs, torch.multinomial(chances, 1, generator=generator).view(logits.shape[:-1])


def to_device(batch: Any, device: torch.device) -> Any:
    """The tensors of a batch where the model is: in tuples, lists and mappings, or by itself.

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


def place_of(model: nn.Module) -> torch.device:
    """Where a model's first parameter is; without one, the CPU."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))
