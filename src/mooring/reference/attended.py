"""Which predictions of a batch count: those at tokens that the model attends to, not at padding.

For tokens the inputs decide, not the labels: a model that learns answers should keep what it predicts in the prompts.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mooring.reference.batches import find_labels, inputs_of, tensors_in
from mooring.reference.reference_labels import IGNORED_LABEL

LENGTHS = "length"
"""What the name of an argument that gives the lengths of sequences contains."""


def attended(model: nn.Module, batch: Any, shape: torch.Size | None) -> Tensor | None:
    """Return which predictions count, bool of this shape; None if all do.

    Args:
        model: the model, whose embedding may have a `padding_idx`.
        batch: a batch.
        shape: that of the predictions, (samples, ...).

    Example:
        >>> batch = {"input_ids": torch.tensor([[5, 3, 0]]), "attention_mask": torch.tensor([[1, 1, 0]])}
        >>> attended(nn.Identity(), batch, torch.Size([1, 3]))
        tensor([[ True,  True, False]])
    """
    if shape is None:
        return None
    labels, inputs = find_labels(batch), inputs_of(batch)
    ignored = labels == IGNORED_LABEL if isinstance(labels, Tensor) and labels.shape == shape else None
    tokens = [t for t in tensors_in(inputs) if not t.is_floating_point() and t.ndim == len(shape) == 2 and t.numel()]
    ids = max(tokens, key=lambda t: int(t.max())) if len(tokens) > 1 else next(iter(tokens), None)  # not segments
    decodes = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
    if ids is None or decodes:  # labels are a decoder's inputs, and there is no mask of pixels
        mask = named_mask(inputs, shape, "decoder_attention_mask") if decodes else named_mask(inputs, shape)
        return mask if ignored is None or (mask is not None and bool(ignored.logical_not().all())) else ~ignored
    if (mask := named_mask(inputs, shape)) is not None:
        return mask
    if ids.shape != shape:
        return None if ignored is None else ~ignored
    if (padding := _padding_index(model, ids)) is not None:
        return ids != padding
    return None if ignored is None else ~_repeated_end(ids, ignored.to(ids.device))


def named_mask(inputs: Any, shape: torch.Size, name: str = "attention_mask") -> Tensor | None:
    """Return the mask among named inputs: attended is True in the result, whatever it is in the inputs.

    A mask of attention has a 0 at padding, one of padding (such as `src_key_padding_mask`) a True or -inf. Lengths say
    how many places of each sample count. Tokens that a model puts before its inputs, such as a trained prompt, count.
    """
    if not isinstance(inputs, Mapping) or len(shape) < 2:
        return None
    mask = None
    for key, value in inputs.items():
        if not isinstance(value, Tensor):
            continue
        if key == name:
            mask = value != 0
        elif key.endswith("padding_mask"):
            mask = ~value if value.dtype == torch.bool else value >= 0 if value.is_floating_point() else value == 0
        elif LENGTHS in key and value.shape == shape[:1]:
            mask = torch.arange(shape[1], device=value.device) < value[:, None]
    if mask is not None and mask.ndim == 2 and len(mask) == shape[0] and mask.shape[1] < shape[1]:
        mask = nn.functional.pad(mask, (shape[1] - mask.shape[1], 0), value=True)
    return mask if mask is not None and mask.shape == shape else None


def with_lengths(model: nn.Module, batch: Any) -> Any:
    """Return (ids, lengths) as the two arguments of a model that takes lengths; any other batch as it is.

    Example:
        >>> class Tagger(nn.Module):
        ...     def forward(self, ids, lengths): ...
        >>> with_lengths(Tagger(), (torch.zeros(2, 3).long(), torch.tensor([3, 1])))["lengths"]
        tensor([3, 1])
    """
    if not isinstance(batch, tuple | list) or len(batch) != 2 or not all(isinstance(part, Tensor) for part in batch):
        return batch
    names = [*inspect.signature(model.forward).parameters]
    inputs, lengths = batch
    fits = inputs.ndim > 1 and lengths.shape == inputs.shape[:1] and not lengths.is_floating_point()
    if not fits or len(names) < 2 or LENGTHS not in names[1]:
        return batch
    return {names[0]: inputs, names[1]: lengths}


def _padding_index(model: nn.Module, ids: Tensor) -> int | None:
    """Return the `padding_idx` of the model's embedding of these ids; None if it has none."""
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.num_embeddings > int(ids.max()):
            return module.padding_idx
    return None


def _repeated_end(ids: Tensor, ignored: Tensor) -> Tensor:
    """Return where one token is repeated to an end of a row and its label is ignored, as padding is.

    Example:
        >>> ids = torch.tensor([[7, 5, 3, 0, 0], [6, 5, 4, 2, 0]])
        >>> labels = torch.tensor([[-100, 5, 3, -100, -100], [-100, 5, 4, 2, -100]])
        >>> _repeated_end(ids, labels == -100)
        tensor([[False, False, False,  True,  True],
                [False, False, False, False,  True]])
    """
    best = torch.zeros_like(ignored)
    for end in (-1, 0):
        tokens = {*ids[:, end][ignored[:, end]].tolist()}
        if len(tokens) != 1:  # not the end of a prompt, whose tokens differ
            continue
        padding = ignored & (ids == tokens.pop())
        run = padding.flip(1).cummin(1).values.flip(1) if end else padding.cummin(1).values
        best = run if int(run.sum()) > int(best.sum()) else best
    return best
