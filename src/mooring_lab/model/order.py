"""The order in which a run sees its data: it depends only on the run's seed, not on the other runs of its fleet."""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor


def seeded_generator(*parts: int | str) -> torch.Generator:
    """Return a CPU generator seeded by what its numbers are for, such as (seed, "order", task, epoch).

    Example:
        >>> first, again = (torch.rand(1, generator=seeded_generator(0, "order")) for _ in range(2))
        >>> bool(first == again)
        True
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest, "big") >> 1)


def batch_sizes(count: int, batch: int) -> list[int]:
    """Return the sizes of the batches of one epoch; the last one may be smaller.

    Example:
        >>> batch_sizes(25, 10)
        [10, 10, 5]
    """
    return [min(batch, count - start) for start in range(0, count, batch)]


def repeat_batches(order: Tensor, sizes: Sequence[int], repeats: int) -> tuple[Tensor, list[int]]:
    """Return an epoch in which every batch comes `repeats` times in a row: its indices and the sizes of its batches.

    Args:
        order: the epoch's indices, of shape (runs, images).
        sizes: of the batches.
        repeats: how often each batch comes.

    Example:
        >>> repeat_batches(torch.tensor([[5, 6, 7]]), [2, 1], 2)
        (tensor([[5, 6, 5, 6, 7, 7]]), [2, 2, 1, 1])
    """
    batches = [batch for batch in torch.split(order, list(sizes), 1) for _ in range(repeats)]
    return torch.cat(batches, 1), [batch.shape[1] for batch in batches]


def task_order(seed: int, task: int, epoch: int, indices: Tensor) -> Tensor:
    """Return the shuffled indices of a task's images, of shape (n,), for one epoch, counted within the task.

    Example:
        >>> task_order(0, 0, 0, torch.arange(4)).sort().values
        tensor([0, 1, 2, 3])
    """
    return indices[torch.randperm(len(indices), generator=seeded_generator(seed, "order", task, epoch))]


def joint_order(seed: int, task: int, epoch: int, indices: Sequence[Tensor], epochs: int) -> Tensor:
    """Return the indices that joint training uses in place of one epoch of one task.

    The indices of all tasks are shuffled `epochs` times and concatenated. This sequence is then cut into pieces as
    long as the tasks' epochs. Joint training therefore has as many steps, of the same sizes, as any other run.
    `indices` has the indices of each task's images, and `epochs` is the number of epochs of a task.

    Example:
        >>> tasks = [torch.arange(2), torch.arange(2, 5)]
        >>> torch.cat([joint_order(0, task, 0, tasks, 1) for task in (0, 1)]).sort().values
        tensor([0, 1, 2, 3, 4])
    """
    all_indices = torch.cat(list(indices))
    start = sum(len(part) for part in indices[:task]) * epochs + epoch * len(indices[task])
    end = start + len(indices[task])
    passes = range(start // len(all_indices), (end - 1) // len(all_indices) + 1)
    sequence = torch.cat([task_order(seed, -1, number, all_indices) for number in passes])
    return sequence[start - passes[0] * len(all_indices) :][: end - start]
