"""Infers what outputs are, from a configuration, the outputs, their labels and the gradient of a loss."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mooring.errors import MooringError
from mooring.observe.output_observer import class_dimension
from mooring.reference.batches import (
    Loss,
    Outputs,
    device_of,
    find_labels,
    inputs_of,
    name_batch,
    outputs_on,
    rows_of,
    samples_of,
    scalar_loss,
    sums_to_one,
    tensors_in,
    to_device,
)
from mooring.reference.kinds import Classes, Embedding, Labels, OutputKind, Values
from mooring.reference.kinds.evidence import GradientEvidence
from mooring.reference.kinds.values import is_map, is_target
from mooring.reference.preserve_model_state import preserve_model_state, state_of_passes
from mooring.reference.reference_labels import ignores_labels, refuse_rows, without_labels

UNIT = 1e-2
"""How far the norm of a vector of unit norm may be from 1."""

PROBLEMS: dict[str, type[OutputKind]] = {
    "multi_label_classification": Labels,
    "regression": Values,
    "single_label_classification": Classes,
}
"""The kinds of the problems that a configuration of transformers names."""

MANY_LABELS = 2
"""The fewest samples whose norms say that outputs are embeddings."""

NOT_STACKED = (
    "the data or reference has single samples, not batches: stack single samples into batches, as in "
    "DataLoader(list(zip(x, y)), batch_size=32)"
)
"""What to do about samples in the place of batches."""

SAME = 1e-2
"""How far the outputs of a part of a batch may be from those in the whole batch, as a part of the largest output."""


@dataclass(frozen=True)
class OutputsOfReference:
    """What the outputs on a reference are.

    Attributes:
        kind: their kind, fitted to the reference; None if they are not found.
        inferred: whether it was inferred.
        whole: whether the outputs of a sample depend on the others of its batch, which has to stay whole.
    """

    kind: OutputKind | None
    inferred: bool
    whole: bool


@torch.no_grad()
def read_outputs(
    model: nn.Module, batches: Sequence[Any], named: OutputKind | None, outputs: Outputs | None, loss: Loss | None
) -> OutputsOfReference:
    """Return what the outputs on a reference are; the model does not change.

    Args:
        model: the model.
        batches: the reference.
        named: the kind that the user named; None to infer it.
        outputs: takes what the model returns and gives its outputs; None is as their kind finds them.
        loss: the loss that is measured, whose gradient shows the kind; None for the divergence.
    """
    refuse_samples(batches[0])
    kind = named or Classes()
    find = outputs or kind.find

    drops = ignores_labels(model, to_device(batches[0], device_of(model)), find)

    def on(batch: Any) -> Any:
        return outputs_on(model, to_device(without_labels(batch) if drops else batch, device_of(model)), find)

    with preserve_model_state(model):
        try:
            with name_batch(0, None):
                first = on(batches[0])
        except MooringError as error:
            if state := state_of_passes(model):
                raise MooringError(
                    f"{error}; the model keeps a tensor of its last pass in {state!r}, which may not fit: reset it"
                ) from error
            if named is not None or error.__cause__ is not None:
                raise
            return OutputsOfReference(None, inferred=True, whole=False)
        whole = not _is_apart(batches[0], first, on)
    if named is None and loss is None:
        kind = infer_kind(model, first, batches[0])
    elif named is None and loss is not None:
        kind = infer_kind_of_loss(model, outputs, batches[0], loss, _kind_or_values(model, first, batches[0]))
    kind.check(first)
    if isinstance(kind, Values | Embedding):
        with preserve_model_state(model):
            kind = kind.fitted([on(batch) for batch in batches], [find_labels(batch) for batch in batches])
    return OutputsOfReference(kind, inferred=named is None, whole=whole)


def _kind_or_values(model: nn.Module, outputs: Tensor, batch: Any) -> OutputKind:
    """Return the kind of outputs on a batch; values if they do not say."""
    try:
        return infer_kind(model, outputs, batch)
    except MooringError:
        return Values()


def refuse_samples(batch: Any) -> None:
    """Refuse rows of a dataset, and single samples, in the place of batches.

    Example:
        >>> refuse_samples((torch.zeros(3), torch.tensor(1)))
        Traceback (most recent call last):
        ...
        mooring.errors.MooringError: the data or reference has single samples, not batches: stack single samples ...
    """
    refuse_rows(batch)
    labels = find_labels(batch)
    if isinstance(labels, Tensor) and labels.ndim == 0:
        raise MooringError(NOT_STACKED)


def _is_apart(batch: Any, outputs: Any, on: Callable[[Any], Any]) -> bool:
    """Return whether a half of a batch has the outputs that it has in the whole batch.

    It has not where samples see each other, as the nodes of a graph do, or the texts that an image is compared with.
    """
    count = samples_of(batch)
    if count < 2 or not isinstance(outputs, Tensor) or len(outputs) % count:
        return count < 2 or not isinstance(outputs, Tensor)
    rows = count // 2
    try:
        half = on(rows_of(batch, slice(0, rows)))
    except Exception:  # whatever a model raises whose batch is no batch of samples
        return False
    expected = outputs[: rows * (len(outputs) // count)]
    if half.shape != expected.shape:
        return False
    return bool((half - expected).abs().max() <= SAME * expected.abs().max())


def infer_kind(model: nn.Module, outputs: Tensor, batch: Any) -> OutputKind:
    """Return the kind of outputs on a batch.

    A configuration decides first, then the form of the outputs, then that of the labels. Otherwise they are classes.

    Example:
        >>> x, tags = torch.randn(4, 3), torch.tensor([[1.0, 1.0], [0.0, 1.0], [0.0, 0.0], [1.0, 0.0]])
        >>> infer_kind(nn.Identity(), torch.randn(4, 2), (x, tags)), infer_kind(nn.Identity(), torch.randn(4, 2), x)
        (Labels(), Classes(dimension=None))
    """
    labels = find_labels(batch)
    if (problem := _problem(model, outputs)) is not None:
        return problem
    if _has_unit_norm(outputs):
        return Embedding()
    if isinstance(labels, Tensor) and labels.is_floating_point() and is_target(outputs, labels):
        return _kind_of_numbers(labels)
    single = outputs.numel() == len(outputs)
    if isinstance(labels, Tensor) and not labels.is_floating_point() and labels.numel():
        if labels.shape == outputs.shape or is_map(outputs, labels) or (single and labels.numel() == len(outputs)):
            return Labels() if bool(((labels == 0) | (labels == 1)).all()) else Values()
        if (dimension := _dimension_of(outputs, labels)) is not None:
            return Classes(None if dimension == class_dimension(outputs) else dimension)
    if single:
        if tensors_in(inputs_of(batch))[0].shape[:1] != outputs.shape[:1]:
            raise MooringError(NOT_STACKED)
        raise MooringError(
            'a single output without labels may be a label or a value: give attach kind="labels" or kind="values", '
            "a reference of (inputs, labels), or a loss(model, batch)"
        )
    floating = [t for t in tensors_in(inputs_of(batch)) if t.is_floating_point()]
    if outputs.ndim > 2 and any(t.shape == outputs.shape for t in floating):
        return Values()  # a reconstruction
    return Classes()


def infer_kind_of_loss(
    model: nn.Module, outputs: Outputs | None, batch: Any, loss: Loss, inferred: OutputKind
) -> OutputKind:
    """Return the kind that the gradient of a loss at the outputs shows; the inferred one if it shows nothing.

    Args:
        model: the model.
        outputs: takes what the model returns and gives the tensor of its outputs; None is `find_outputs`.
        batch: a batch of the reference.
        loss: the user's loss on a batch.
        inferred: the kind without it.
    """
    seen: list[Tensor] = []

    def keep(module: nn.Module, args: Any, returned: Any) -> None:
        given = (outputs or inferred.find)(returned)
        if isinstance(given, Tensor) and given.requires_grad:
            seen.append(given)

    handle = model.register_forward_hook(keep)
    try:
        with preserve_model_state(model), torch.enable_grad(), name_batch(0, loss):
            value = scalar_loss(loss, model, batch)
            if len(seen) != 1 or not value.requires_grad:
                return inferred
            gradients: Sequence[Tensor | None] = torch.autograd.grad(value, seen, allow_unused=True)
    finally:
        handle.remove()
    if (gradient := gradients[0]) is None:
        return inferred
    return GradientEvidence.of(seen[0], gradient).kind(inferred) or inferred


def _problem(model: nn.Module, outputs: Tensor) -> OutputKind | None:
    """Return the kind that the configuration of a model of transformers names; None if it names none."""
    config = getattr(model, "config", None)
    if kind := PROBLEMS.get(getattr(config, "problem_type", None) or ""):
        return kind()
    alone = outputs.ndim == 2 and outputs.shape[1] == 1
    return Values() if alone and getattr(config, "num_labels", None) == 1 else None  # as its own loss is chosen


def _has_unit_norm(outputs: Tensor) -> bool:
    """Return whether outputs are vectors of norm 1, but not choices of one class."""
    if outputs.ndim != 2 or outputs.shape[1] < 2 or len(outputs) < MANY_LABELS:
        return False
    norms = outputs.detach().float().norm(dim=1)
    return bool(((norms - 1).abs() <= UNIT).all()) and bool((outputs < 0).any())


def _kind_of_numbers(labels: Tensor) -> OutputKind:
    """Return the kind of labels that are floating-point numbers, one for each output."""
    if sums_to_one(labels):
        return Classes()
    return Labels() if bool(((labels == 0) | (labels == 1)).all()) else Values()


def _dimension_of(outputs: Tensor, labels: Tensor) -> int | None:
    """Return the dimension of the outputs that labels count, preferably the usual one; None if there is none."""
    if outputs.ndim < 2:
        return None
    largest, usual = int(labels.max()), class_dimension(outputs)
    for dimension in (usual, *range(1, outputs.ndim)):
        others = outputs.shape[:dimension] + outputs.shape[dimension + 1 :]
        if labels.shape == others and largest < outputs.size(dimension):
            return int(dimension)
    return None
