"""Labels of reference batches: drawn from the model's prediction if there are none, and shifted where a model does."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mooring.errors import MooringError, warn
from mooring.observe.output_observer import class_dimension, find_outputs
from mooring.reference.batches import (
    LOSS_HINT,
    Outputs,
    cross_entropy,
    device_of,
    is_pair,
    is_row,
    outputs_on,
    returned_loss,
    scalar_loss,
    tensors_in,
    to_device,
)
from mooring.reference.kinds import Classes, OutputKind
from mooring.reference.kinds.classes import draw_classes
from mooring.reference.preserve_model_state import preserve_model_state

IGNORED_LABEL = -100
"""The label that a cross entropy leaves out."""

MAX_PROBABILITIES = 1 << 24
"""Probabilities that are computed at once when labels are drawn: those of all tokens would fill the memory."""

SEEN_PREDICTIONS = 64
"""The number of predictions that show whether a model returns probabilities."""


def prepare_labels(model: nn.Module, batch: Any, seed: int, outputs: Outputs | None = None) -> Any:
    """Return a batch whose labels `default_loss` can take.

    Inputs alone get labels drawn from the model's prediction; for a language model, which predicts the next token at
    each position, a next token at each. Padding, where `attention_mask` is 0, gets the label -100. In expectation the
    squared score of such labels is the Fisher information at the present parameters, and the rise of their loss is the
    Kullback-Leibler divergence from the present model. So the model's predictions are kept, right or wrong.

    A pair (ids, ids), whose labels repeat its inputs, is for models that shift labels by one themselves, as language
    models of transformers do: it becomes a mapping, so that the model computes its own loss. So does a pair for an
    encoder with a decoder. Every other batch is returned as it is.

    Args:
        model: the model. Where labels are drawn, its outputs are logits, (samples, classes) or (samples, positions,
            classes).
        batch: a batch of data. Inputs alone are a tensor, a tuple or list of that tensor alone, as a `TensorDataset`
            of inputs gives it, or a mapping without `labels`, for which the model returns no loss.
        seed: the number of the batch, and the seed of labels that are drawn; the global random state is not used.
        outputs: takes what the model returns and gives the tensor of its outputs; None is `find_outputs`.

    Example:
        >>> x, y = prepare_labels(nn.Identity(), torch.tensor([[0.0, 99.0], [99.0, 0.0]]), seed=0)
        >>> y
        tensor([1, 0])
    """
    _check_batch(model, batch, seed)
    if (inputs := _unlabelled(batch)) is not None:
        with torch.no_grad():
            _, labelled = _predict(model, inputs, seed, outputs)
        return batch if labelled is None else labelled
    if not is_pair(batch) or isinstance(batch[0], Mapping):
        return batch
    repeats = repeats_inputs(*batch)
    if not repeats and not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return batch
    if (name := name_of_inputs(model)) is not None:
        return {name: batch[0], "labels": batch[1]}
    if repeats and seed == 0:
        warn(
            "the labels of the data or reference equal its inputs, which says nothing about a model that predicts the "
            "next token: give (ids[:, :-1], ids[:, 1:]), or the loss(model, batch) of training",
        )
    return batch


def _check_batch(model: nn.Module, batch: Any, seed: int) -> None:
    """Refuse rows of a dataset, and warn if a masked language model is to predict the very tokens that it is given."""
    refuse_rows(batch)
    base: Any = getattr(model, "get_base_model", lambda: getattr(model, "_orig_mod", model))()
    if seed or not type(base).__name__.endswith("ForMaskedLM"):
        return
    parts = (batch.get("input_ids"), batch.get("labels")) if isinstance(batch, Mapping) else batch
    if is_pair(parts) and isinstance(parts[0], Tensor) and repeats_inputs(*parts):
        warn(
            "the labels of the data or reference equal its inputs, which a masked language model only has to copy: "
            "mask tokens of the inputs, and give -100 as the label of the others, as in training"
        )


def refuse_rows(batch: Any) -> None:
    """Refuse a row of a dataset in the place of a batch."""
    if is_row(batch):
        raise MooringError(
            f"the data or reference has rows with {', '.join(map(str, batch))}, not batches of tensors: give a "
            "DataLoader(rows, batch_size=..., collate_fn=...) that makes batches as in training"
        )


def repeats_inputs(inputs: Tensor, labels: Tensor) -> bool:
    """Return whether labels are the token ids of the inputs, apart from labels of -100.

    Example:
        >>> ids = torch.tensor([[3, 1, 2]])
        >>> repeats_inputs(ids, torch.tensor([[-100, 1, 2]])), repeats_inputs(ids[:, :-1], ids[:, 1:])
        (True, False)
    """
    if inputs.is_floating_point() or labels.is_floating_point() or labels.ndim < 2 or labels.shape != inputs.shape:
        return False
    labels = labels.to(inputs.device)
    return bool(((labels == inputs) | (labels == IGNORED_LABEL)).all())


def name_of_inputs(model: nn.Module) -> str | None:
    """Return the name of the first argument of a model that takes `labels` too; None if it takes no labels.

    Example:
        >>> name_of_inputs(nn.Linear(2, 3)) is None
        True
    """
    parameters = inspect.signature(model.forward).parameters
    if "labels" in parameters:
        return next(iter(parameters))
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None  # not a wrapper, which passes on whatever it gets
    wrapped = (getattr(model, name, None) for name in ("module", "_orig_mod"))  # of DDP, and of compiled models
    base: Any = getattr(model, "get_base_model", None)  # of PEFT
    inner = base() if callable(base) else next(filter(None, wrapped), None)
    return name_of_inputs(inner) if isinstance(inner, nn.Module) else None


def default_loss_in_one_pass(
    model: nn.Module, batch: Any, seed: int, outputs: Outputs | None = None, kind: OutputKind | None = None
) -> Tensor:
    """Compute the mean default loss of a batch, with the labels of `prepare_labels`, in a single forward pass.

    Of other outputs than classes it is the loss of targets that are drawn from the model's prediction.

    Example:
        >>> default_loss_in_one_pass(nn.Identity(), torch.tensor([[0.0, 99.0], [99.0, 0.0]]), seed=0)
        tensor(0.)
    """
    _check_batch(model, batch, seed)
    if kind is not None and not isinstance(kind, Classes):
        device = device_of(model)
        predicted = outputs_on(model, to_device(batch, device), outputs or kind.find)
        return kind.drawn_loss(predicted, torch.Generator(device).manual_seed(seed))
    if isinstance(kind, Classes) and kind.dimension is not None:
        outputs = partial(_in_usual_order, kind, outputs or find_outputs)
    if seed == 0:
        outputs = partial(_checked_logits, outputs or find_outputs)
    if (inputs := _unlabelled(batch)) is None:
        batch = prepare_labels(model, batch, seed, outputs)
        return scalar_loss(None, model, batch, outputs)
    returned, labelled = _predict(model, inputs, seed, outputs)
    if labelled is None:
        return scalar_loss(lambda *_: returned, model, batch)
    return cross_entropy(returned, labelled[1])


def _in_usual_order(kind: Classes, outputs: Outputs, returned: Any) -> Tensor:
    """Return logits with the classes in the dimension where `cross_entropy` expects them."""
    logits = outputs(returned)
    return logits.movedim(kind.dimension or 0, class_dimension(logits))


def _checked_logits(outputs: Outputs, returned: Any) -> Tensor:
    """Return the outputs in what a model returned, and warn if they are probabilities instead of logits."""
    logits = outputs(returned)
    warn_of_probabilities(logits)
    return logits


def warn_of_probabilities(outputs: Tensor) -> None:
    """Warn if outputs are probabilities instead of logits."""
    if outputs.ndim < 2 or not outputs.numel():
        return
    values = outputs.detach()
    if values.ndim > 2:
        values = values[:1]  # the first sample of many predictions, which may take much memory
    values = values.movedim(class_dimension(values), -1).flatten(0, -2)[:SEEN_PREDICTIONS].float()
    if values.shape[-1] > 1 and bool((values >= 0).all()):
        sums = values.sum(-1)
        if bool(torch.isclose(sums, torch.ones_like(sums), atol=1e-2).all()):
            warn(
                "the model returns probabilities, and Mooring takes outputs as logits, so it would measure much less "
                "forgetting than there is: return logits, or give outputs=lambda p: p.clamp_min(1e-9).log()"
            )


FEWEST_LABELS = 8
"""Fewer logits may all be between 0 and 1 by chance."""


def warn_of_coins(outputs: Tensor) -> None:
    """Warn if outputs are probabilities of labels instead of logits.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     warn_of_coins(torch.rand(8, 3))
        >>> str(caught[0].message).partition(",")[0]
        'the model returns probabilities of labels'
    """
    values = outputs.detach()
    if values.numel() >= FEWEST_LABELS and bool(((values >= 0) & (values <= 1)).all()):
        warn(
            "the model returns probabilities of labels, and Mooring takes outputs as logits, so it would measure much "
            "less forgetting than there is: return logits, or give outputs=lambda p: p.clamp(1e-6, 1 - 1e-6).logit()"
        )


def _unlabelled(batch: Any) -> Tensor | Mapping[str, Any] | None:
    """Return the inputs of a batch that may need labels; None if it has labels or is of another kind."""
    if isinstance(batch, tuple | list) and len(batch) == 1:
        batch = batch[0]
    if not isinstance(batch, Tensor | Mapping) or (isinstance(batch, Mapping) and "labels" in batch):
        return None
    return batch


def _predict(
    model: nn.Module, batch: Any, seed: int, outputs: Outputs | None
) -> tuple[Tensor, tuple[Any, Tensor] | None]:
    """Return the logits of inputs, and the inputs with drawn labels; the model's own loss and None if it has one.

    These inputs are where they were, so that a batch which is kept takes no memory of the device.
    """
    inputs = to_device(batch, device_of(model))
    returned = model(**inputs) if isinstance(inputs, Mapping) else model(inputs)
    if isinstance(inputs, Mapping) and (loss := returned_loss(returned)) is not None:
        return loss, None
    logits = (outputs or find_outputs)(returned)
    return logits, (batch, _draw_labels(logits.detach(), inputs, seed))


def _draw_labels(logits: Tensor, inputs: Any, seed: int) -> Tensor:
    """Draw a label for each prediction, and -100 for padding."""
    if logits.ndim not in (2, 3):
        raise MooringError(
            f"cannot draw labels from outputs of shape {tuple(logits.shape)}, which must be (samples, classes) or "
            f"(samples, positions, classes): stack single samples into batches, give (inputs, labels), or {LOSS_HINT}"
        )
    if logits.shape[-1] == 1:
        raise MooringError(f"cannot draw labels from a single output, which has no classes: {LOSS_HINT}")
    rows, generator = logits.flatten(0, -2), torch.Generator(logits.device).manual_seed(seed)
    parts = torch.split(rows, max(1, MAX_PROBABILITIES // rows.shape[-1]))
    labels = torch.cat([draw_classes(part, generator) for part in parts]).view(logits.shape[:-1])
    mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
    if isinstance(mask, Tensor) and mask.shape == labels.shape:
        labels = labels.masked_fill(mask == 0, IGNORED_LABEL)
    return labels


def without_labels(batch: Any) -> Any:
    """Return a batch without the labels of a mapping.

    Example:
        >>> without_labels({"x": 1, "labels": 2})
        {'x': 1}
    """
    if not isinstance(batch, Mapping):
        return batch
    return {name: value for name, value in batch.items() if name != "labels"}


@torch.no_grad()
def ignores_labels(model: nn.Module, batch: Any, find: Callable[[Any], Any]) -> bool:
    """Return whether a mapping's labels change nothing but the loss; decoders of some models read them.

    A fused loss returns no outputs where there are labels.
    """
    if not isinstance(batch, Mapping) or "labels" not in batch:
        return False
    with preserve_model_state(model):
        try:
            outputs = outputs_on(model, without_labels(batch), find)
        except Exception:  # whatever a model raises that needs its labels
            return False
        try:
            expected = outputs_on(model, batch, find)
        except MooringError:
            return True
    pairs = zip(tensors_in(outputs), tensors_in(expected), strict=True)
    return all(torch.equal(*pair) for pair in pairs)
