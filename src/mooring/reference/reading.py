"""What can be wrong with a reference although it fits the model: its order, its memory, and how small it is."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from mooring.errors import UnheldWarning, announce, warn
from mooring.reference.batches import find_labels, map_tensors, samples_of, tensors_in
from mooring.reference.kinds import Classes, Labels, OutputKind

ENOUGH_SAMPLES = 50
"""The standard error of a measured value over fewer samples is of the size of the value itself."""

SMALLEST_RISE = 0.01
"""A loss that may rise by a smaller part of itself leaves hardly any room to learn."""

SORTED = 0.5
"""Labels are in an order if they change less often than this part of what chance would give."""


def spread(data: Any, batches: int | None) -> Any:
    """Return so many batches, spread evenly over a list or a loader that has more and gives them in a fixed order.

    Example:
        >>> spread([0, 1, 2, 3, 4, 5], 3), spread([0, 1], 3)
        ([0, 2, 4], [0, 1])
    """
    if batches is None or not isinstance(batches, int) or batches < 1:
        return data
    if isinstance(data, list | tuple):
        return [data[index * len(data) // batches] for index in range(batches)] if len(data) > batches else data
    if type(data) is not DataLoader or isinstance(data.dataset, IterableDataset):
        return data
    sampler = data.batch_sampler
    if type(sampler) is not BatchSampler or type(data.sampler) is not SequentialSampler or len(sampler) <= batches:
        return data
    chosen = spread([*sampler], batches)
    return DataLoader(data.dataset, batch_sampler=chosen, collate_fn=data.collate_fn, num_workers=data.num_workers)


def own_memory(batch: Any, data: Any) -> Any:
    """Return a batch without its graph, and in memory of its own unless it is in a list: a loader may reuse it."""
    if isinstance(data, list | tuple):
        foreign = any(t.requires_grad or t.is_inference() for t in tensors_in(batch))
        return map_tensors(batch, lambda t: t.detach().clone()) if foreign else batch
    return map_tensors(batch, lambda t: t.detach().clone())


def warn_of_order(read: Sequence[Any], batches: int | None) -> None:
    """Warn of labels that are sorted by class, if more batches may follow than were read one after the other."""
    if batches is None or len(read) < batches:
        return
    labels = [find_labels(batch) for batch in read]
    if not all(isinstance(y, Tensor) and y.ndim == 1 and not y.is_floating_point() for y in labels):
        return
    if are_sorted(torch.cat([y.cpu() for y in labels])):
        warn(
            f"the labels of the reference are in an order, and only its first {batches} batches are read, so classes "
            "may be missing: shuffle it, give a list or a DataLoader without an order, or batches=None to read all",
            UnheldWarning,
        )


def are_sorted(labels: Tensor) -> bool:
    """Return whether labels change much less often from one to the next than they would by chance, or never.

    Example:
        >>> labels = torch.arange(100) // 50
        >>> are_sorted(labels), are_sorted(labels[torch.randperm(100)])
        (True, False)
    """
    if len(labels) < ENOUGH_SAMPLES:
        return False
    _, counts = torch.unique(labels, return_counts=True)
    shares = counts / len(labels)
    expected = (len(labels) - 1) * (1 - float(shares.square().sum()))
    return not expected or int((labels[1:] != labels[:-1]).sum()) < SORTED * expected


def announce_few_samples(read: Sequence[Any]) -> None:
    """Say how many samples a reference has if they are too few to say much about other data."""
    counts = [samples_of(batch) for batch in read]
    if counts and all(counts) and sum(counts) < ENOUGH_SAMPLES:
        announce(
            f"the reference has {sum(counts)} samples, and what is measured on so few says little about other data: "
            "give a few hundred that the model has not been trained on"
        )


def warn_of_unit(losses: Sequence[Any], kind: OutputKind | None, named: float) -> None:
    """Warn if the rise of a loss that is no likelihood is limited by a budget in nats, of another size than the loss.

    Args:
        losses: the losses on the batches of a reference; anything else is no loss.
        kind: of the outputs.
        named: the budget.
    """
    values = [value for value in losses if isinstance(value, float)]
    if not values or isinstance(kind, Classes | Labels):
        return
    if (mean := sum(values) / len(values)) <= 0:
        return  # the negative logarithm of a density, which is in nats
    other = 'kind="values", which is measured in units of the original error' if kind else "a divergence as kind="
    if not SMALLEST_RISE * mean <= named <= mean:
        warn(
            f"the loss is {mean:.2g} on the reference, and the default budget lets it rise by {named:g} of its own "
            f"units: name one in its unit, such as pull=mooring.Budget({mean / 5:.1g}), or leave loss out and give "
            f"{other}",
            UnheldWarning,
        )
