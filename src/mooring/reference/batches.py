"""Batches of reference data: read or generated, placed on a device, split in two, and the loss of a model on one."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from numbers import Number
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mooring.errors import MooringError, check_whole, first_line
from mooring.observe.output_observer import class_dimension, find_outputs

Data = Iterable[Any] | Callable[[nn.Module], Any]
"""Batches, or a function from the model to a batch, such as sequences that the model generates."""

Outputs = Callable[[Any], Tensor]
"""A function that takes what a model returns and gives the tensor of its outputs."""

Loss = Callable[[nn.Module, Any], Tensor]
"""A function (model, batch) -> mean loss, a scalar tensor."""

LOSS_HINT = "give a loss(model, batch) that returns the mean loss"
"""What to do about a batch whose loss is not known; the end of several error messages."""

LEAVE_OUT = "nothing was changed: leave the batch out, or check its inputs, its labels and the loss"
"""What to do about a batch whose loss or outputs are not finite."""

RESIDENT_PART = 0.005
"""The part of a GPU's memory that the batches of one gauge may take there."""

MIN_BATCHES = 4
"""Fewer batches than this are split by their rows."""

EVERY = 3
"""One batch, or one row, in so many is held out."""

MIN_ROWS = 16
"""The fewest rows that are held out; with fewer, all of a reference serves both purposes."""


def iter_batches(data: Data, model: nn.Module, batches: int | None) -> Iterator[Any]:
    """Return an iterator over at most `batches` batches; a function is called exactly so often, without gradients."""
    if batches is not None:
        check_whole("batches", batches, 1)
    if isinstance(data, Tensor | str | Mapping) or not (callable(data) or isinstance(data, Iterable)):
        raise MooringError(f"data of type {type(data).__name__} is not a collection of batches: {_batches_hint(data)}")
    if isinstance(data, Iterable):
        return islice(data, batches)
    if batches is None:
        raise MooringError("data is a function, which has no number of batches: give batches=")
    try:
        inspect.signature(data, follow_wrapped=False).bind(model)
    except TypeError:
        raise MooringError("data is a function that does not take the model alone: write it as f(model)") from None
    except ValueError:  # a function in C, without a signature
        pass
    generate = torch.no_grad()(data)
    return (generate(model) for _ in range(batches))


def _batches_hint(data: Any) -> str:
    """Return what to give instead of data that is not a collection of batches."""
    if isinstance(data, Tensor):
        return "split it, as in x.split(32)"
    if isinstance(data, torch.utils.data.Dataset):
        return "give DataLoader(dataset, batch_size=32)"
    return "give a loader, a list like [(x, y)], or a function from the model to a batch"


def is_row(item: Any) -> bool:
    """Return whether an item of data is a row of a dataset: a mapping to lists, numbers or text, or to one sample.

    A mapping to tensors has one sample if its `input_ids` are one sequence, or its `labels` one number.

    Example:
        >>> is_row({"input_ids": [1, 2]}), is_row({"input_ids": torch.zeros(4, 2)})
        (True, False)
        >>> is_row({"pixel_values": torch.zeros(3, 8, 8), "labels": 1})
        True
    """
    if not isinstance(item, Mapping) or not item:
        return False
    if not any(isinstance(value, Tensor) for value in item.values()):
        return True
    ids, label = item.get("input_ids"), item.get("labels", item.get("label"))
    is_sequence = isinstance(ids, Tensor) and ids.ndim < 2
    return is_sequence or isinstance(label, Number) or (isinstance(label, Tensor) and label.ndim == 0)


def to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on a device; it may be a tensor, or nested tuples, lists and mappings.

    Nothing waits for the copy of pinned memory to a GPU.

    Example:
        >>> to_device({"x": torch.zeros(2), "name": "old"}, torch.device("cpu"))
        {'x': tensor([0., 0.]), 'name': 'old'}
    """
    return map_tensors(batch, lambda t: t.to(device, non_blocking=device.type == "cuda"))


def map_tensors(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a batch with each of its tensors changed, however they are nested; anything else stays."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {key: map_tensors(part, change) for key, part in batch.items()}
    if isinstance(batch, tuple | list):
        return [map_tensors(part, change) for part in batch]
    return batch


def tensors_in(batch: Any) -> list[Tensor]:
    """Return the tensors of a batch.

    Example:
        >>> [t.shape for t in tensors_in({"x": torch.zeros(2), "y": [torch.zeros(3), "old"]})]
        [torch.Size([2]), torch.Size([3])]
    """
    tensors: list[Tensor] = []
    map_tensors(batch, lambda t: tensors.append(t) or t)  # type: ignore[func-returns-value]
    return tensors


def samples_of(batch: Any) -> int:
    """Return the number of samples of a batch whose tensors all have as many rows; 0 for another one.

    Example:
        >>> samples_of((torch.zeros(4, 2), torch.zeros(4))), samples_of([torch.zeros(4, 2), torch.zeros(1, 2)])
        (4, 0)
    """
    rows = {len(t) if t.ndim else 0 for t in tensors_in(batch)}
    return rows.pop() if len(rows) == 1 else 0


def rows_of(batch: Any, rows: slice | Tensor) -> Any:
    """Return some rows of all tensors of a batch.

    Example:
        >>> rows_of({"x": torch.arange(4), "name": "a"}, slice(1, 3))
        {'x': tensor([1, 2]), 'name': 'a'}
    """
    return map_tensors(batch, lambda t: t[rows])


def placed(batches: Sequence[Any], device: torch.device) -> list[Any]:
    """Return batches that `to_device` copies without a wait: on the device, or pinned if they are too large for it.

    Example:
        >>> placed([torch.zeros(2)], torch.device("cpu"))
        [tensor([0., 0.])]
    """
    if device.type != "cuda":
        return list(batches)
    size = sum(t.nbytes for batch in batches for t in tensors_in(batch) if t.device != device)
    if size <= resident_bytes(device):
        return [to_device(batch, device) for batch in batches]
    return [map_tensors(batch, lambda t: t.pin_memory() if t.device.type == "cpu" else t) for batch in batches]


def resident_bytes(device: torch.device) -> float:
    """Return the bytes that the batches of one gauge may take of a GPU."""
    return RESIDENT_PART * torch.cuda.get_device_properties(device).total_memory


def split_reference(batches: Sequence[Any], *, whole: bool = False) -> tuple[list[Any], list[Any]]:
    """Return the batches of the gauge and the others; a few batches are split by their rows, unless they are `whole`.

    Both have all of the reference if it is too small, or has batches without rows.

    Example:
        >>> gauge, others = split_reference([torch.arange(48)])
        >>> gauge[0][:4], others[0][:4]
        (tensor([0, 3, 6, 9]), tensor([1, 2, 4, 5]))
    """
    if len(batches) >= MIN_BATCHES:
        return split_batches(batches)
    counts = [0 if whole else samples_of(batch) for batch in batches]
    if min(counts, default=0) < EVERY or sum(counts) < EVERY * MIN_ROWS:
        return list(batches), list(batches)
    rows = [torch.arange(count) for count in counts]
    held_out = [rows_of(batch, index[::EVERY]) for batch, index in zip(batches, rows, strict=True)]
    return held_out, [rows_of(batch, index[index % EVERY > 0]) for batch, index in zip(batches, rows, strict=True)]


def split_batches(batches: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return the batches of the gauge and the others; both have all if there are only a few.

    Example:
        >>> split_batches(range(7)), split_batches(range(2))
        (([0, 3, 6], [1, 2, 4, 5]), ([0, 1], [0, 1]))
    """
    if len(batches) < MIN_BATCHES:
        return list(batches), list(batches)
    held_out = list(batches[::EVERY])
    return held_out, [batch for index, batch in enumerate(batches) if index % EVERY]


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's first parameter; the CPU if it has none."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def default_loss(model: nn.Module, batch: Any, outputs: Outputs | None = None) -> Tensor:
    """Compute the default loss on a batch, which is moved to the model's device.

    For (inputs, labels) it is the mean cross entropy of the outputs, for sequences (samples, positions, classes) over
    the positions too, and for dense outputs (samples, classes, height, width) over the pixels; a label of -100 is
    ignored. Inputs that are a mapping are passed as keyword arguments. A mapping alone is passed so too, and the model
    returns its `loss`, as models of transformers do.

    Args:
        model: the model.
        batch: (inputs, labels), or a mapping that contains the labels.
        outputs: takes what the model returns and gives the tensor of its outputs; None is `find_outputs`.

    Example:
        >>> default_loss(nn.Identity(), (torch.zeros(3, 2), torch.tensor([0, 1, 1])))
        tensor(0.6931)
    """
    batch = to_device(batch, device_of(model))
    if isinstance(batch, Mapping):
        value = returned_loss(model(**batch))
        if value is None:
            raise MooringError(f"the model returned no loss for a batch of {', '.join(batch)}: {LOSS_HINT}")
        return value
    if not is_pair(batch):
        raise _not_a_pair(batch)
    inputs, labels = batch
    returned = model(**inputs) if isinstance(inputs, Mapping) else model(inputs)
    return cross_entropy((outputs or find_outputs)(returned), labels)


def _not_a_pair(batch: Any) -> MooringError:
    """Return the error for a batch that is not (inputs, labels)."""
    given, hint = f"a batch of type {type(batch).__name__}", "give tensors"
    if isinstance(batch, tuple | list):
        given = f"a batch of {len(batch)} parts ({', '.join(type(part).__name__ for part in batch)})"
        if any(isinstance(part, Tensor | tuple | list) for part in batch):
            hint = "name several inputs as the model's arguments, as in ({'x': x, 'mask': mask}, labels)"
    return MooringError(f"{given} is not (inputs, labels): {hint}, or {LOSS_HINT}")


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy of (samples, classes), sequences or dense outputs, as `default_loss` says.

    Example:
        >>> cross_entropy(torch.zeros(3, 2), torch.tensor([0, 1, 1]))
        tensor(0.6931)
    """
    if labels.is_floating_point() and not (labels.shape == logits.shape and sums_to_one(labels)):
        raise MooringError(
            f"labels of shape {tuple(labels.shape)} and {labels.dtype} are not class indices: for the cross entropy "
            f"give integers, or inputs alone; for another loss {LOSS_HINT}"
        )
    if labels.is_floating_point():  # probabilities of classes
        logits, labels = (t.movedim(class_dimension(logits), 1) for t in (logits, labels))
    if logits.ndim > 3 or labels.is_floating_point():
        return functional.cross_entropy(logits, labels)
    return functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


def is_pair(batch: Any) -> bool:
    """Return whether a batch is (inputs, labels), with inputs as a tensor or as keyword arguments.

    Example:
        >>> is_pair((torch.zeros(2, 3), torch.zeros(2))), is_pair(torch.zeros(2, 3))
        (True, False)
    """
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        return False
    return isinstance(batch[0], Tensor | Mapping) and isinstance(batch[1], Tensor)


def inputs_of(batch: Any) -> Any:
    """Return the inputs of a batch: those of (inputs, labels) or (inputs,), or the batch itself.

    Example:
        >>> inputs_of((torch.ones(2), torch.zeros(2)))
        tensor([1., 1.])
    """
    return batch[0] if is_pair(batch) or (isinstance(batch, tuple | list) and len(batch) == 1) else batch


def find_labels(batch: Any) -> Any:
    """Return the labels of a batch: those of (inputs, labels), or what a mapping calls so; None if there are none.

    Example:
        >>> find_labels((torch.ones(2), torch.zeros(2))), find_labels(torch.ones(2))
        (tensor([0., 0.]), None)
    """
    return batch.get("labels") if isinstance(batch, Mapping) else batch[1] if is_pair(batch) else None


def sums_to_one(labels: Tensor) -> bool:
    """Return whether labels are probabilities of several classes, such as those of mixed or smoothed labels.

    Example:
        >>> sums_to_one(torch.tensor([[0.3, 0.7]])), sums_to_one(torch.tensor([[1.0]]))
        (True, False)
    """
    if labels.ndim < 2 or labels.shape[class_dimension(labels)] < 2 or bool((labels < 0).any()):
        return False
    sums = labels.float().sum(class_dimension(labels))
    return bool(torch.isclose(sums, torch.ones_like(sums), atol=1e-3).all())


def outputs_on(model: nn.Module, batch: Any, find: Callable[[Any], Any]) -> Any:
    """Return the model's outputs on the inputs of a batch, which is on its device.

    Example:
        >>> outputs_on(nn.Identity(), (torch.ones(2), torch.zeros(2)), lambda returned: returned)
        tensor([1., 1.])
    """
    inputs = inputs_of(batch)
    if not isinstance(inputs, Tensor | Mapping):
        raise MooringError(
            f"a batch of type {type(batch).__name__} cannot be measured: give (inputs, labels), inputs alone, or a "
            "loss(model, batch)"
        )
    return find(model(**inputs) if isinstance(inputs, Mapping) else model(inputs))


def returned_loss(returned: Any) -> Tensor | None:
    """Return the `loss` in what a model returned; None if there is none.

    Example:
        >>> returned_loss({"loss": torch.tensor(2.0)}), returned_loss(torch.zeros(3))
        (tensor(2.), None)
    """
    loss = returned.get("loss") if isinstance(returned, Mapping) else getattr(returned, "loss", None)
    return loss if isinstance(loss, Tensor) else None


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


@contextmanager
def name_batch(number: int, loss: Loss | None) -> Iterator[None]:
    """Turn errors about shapes, labels and arguments into one that names the batch."""
    try:
        yield
    except (RuntimeError, IndexError, ValueError, TypeError, AttributeError) as error:
        if isinstance(error, MooringError | torch.OutOfMemoryError):
            raise
        reason = first_line(error)
        if isinstance(error, IndexError):  # a label, or a token, that the model does not know
            raise MooringError(
                f"batch {number} of the data or reference does not fit the model ({reason}): the model must have the "
                "outputs that its labels need, counted from 0 (-100 is ignored), and the tokens of its inputs; if a "
                "new head took the place of the old one, keep the old one too, and exclude the new one"
            ) from error
        if loss is None and isinstance(error, NotImplementedError):  # a module without forward()
            raise MooringError(
                f"the model cannot be called on batch {number} of the data or reference ({reason}): define its "
                'forward(), or in Lightning name the module to call, as in MooringCallback(module="net")'
            ) from error
        if loss is not None:
            raise MooringError(
                f"the loss failed on batch {number} of the data or reference ({reason}): it is called with the model "
                "and a batch, as in loss=lambda model, batch: mse_loss(model(batch[0]), batch[1])"
            ) from error
        if isinstance(error, TypeError):  # an argument that is missing, or that the model does not take
            raise MooringError(
                f"batch {number} of the data or reference does not fit the model ({reason}): give inputs alone or "
                "(inputs, labels); a dict of inputs becomes keyword arguments of the model, as in ({'x': x, 'mask': "
                "mask}, labels)"
            ) from error
        raise MooringError(
            f"batch {number} of the data or reference does not fit the model ({reason}): give batches as in training, "
            f"(inputs, labels) or inputs alone, in the model's dtype; for another loss than the cross entropy "
            f"{LOSS_HINT}"
        ) from error
