"""The order in which a run sees its data: drawn by the run's own seed, whatever fleet it sails in."""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["batch_sizes", "joint_order", "seeded_generator", "task_order"]


def seeded_generator(*parts: int | str) -> torch.Generator:
    """Random numbers on the CPU fixed by what they are for, such as (seed, "order", task, epoch).

    Example:
        >>> first, again = (torch.rand(1, generator=seeded_generator(0, "order")) for _ in range(2))
        >>> bool(first == again)
        True
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest, "big") >> 1)


def batch_sizes(count: int, batch: int) -> list[int]:
    """The sizes of the batches of one epoch; the last may be short.

    Example:
        >>> batch_sizes(25, 10)
        [10, 10, 5]
    """
    return [min(batch, count - start) for start in range(0, count, batch)]


def task_order(seed: int, task: int, epoch: int, indices: Tensor) -> Tensor:
    """One epoch of one task: its indices, shuffled.

    Args:
        seed: the run's.
        task: the task's number.
        epoch: the epoch's number within the task.
        indices: where the task's images are, of shape (n,).

    Example:
        >>> task_order(0, 0, 0, torch.arange(4)).sort().values
        tensor([0, 1, 2, 3])
    """
    return indices[torch.randperm(len(indices), generator=seeded_generator(seed, "order", task, epoch))]


def joint_order(seed: int, task: int, epoch: int, indices: Sequence[Tensor], epochs: int) -> Tensor:
    """The stretch of joint training that takes the place of one epoch of one task.

    All tasks' indices are shuffled `epochs` times and laid end to end; the stretches that the tasks would take,
    one after the other, cut that sequence. So joint training takes as many steps, of the same sizes, as any run.

    Args:
        seed: the run's.
        task: the task's number.
        epoch: the epoch's number within the task.
        indices: where each task's images are.
        epochs: how many there are in a task.

    Example:
        >>> tasks = [torch.arange(2), torch.arange(2, 5)]
        >>> torch.cat([joint_order(0, task, 0, tasks, 1) for task in (0, 1)]).sort().values
        tensor([0, 1, 2, 3, 4])
    """
    every = torch.cat(list(indices))
    start = sum(len(part) for part in indices[:task]) * epochs + epoch * len(indices[task])
    end = start + len(indices[task])
    passes = range(start // len(every), (end - 1) // len(every) + 1)
    laid = torch.cat([task_order(seed, -1, number, every) for number in passes])
    return laid[start - passes[0] * len(every) :][: end - start]
