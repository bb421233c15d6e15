"""Part of a stream: some of its tasks, or some of the images of each, and no more memory than that takes."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from mooring.errors import MooringError
from mooring.lab.streams.stream import Source, Split, Stream, Task

__all__ = ["check_task_range", "limit_images", "limit_source", "merge_tasks", "select_tasks"]


def select_tasks(stream: Stream, skip: int = 0, tasks: int | None = None) -> Stream:
    """The stream without its first `skip` tasks, and no more than `tasks` of the rest.

    Example:
        >>> from mooring.lab.streams import by_class, digits
        >>> [task.name for task in select_tasks(by_class(digits(), 2), skip=1, tasks=2).tasks]
        ['2 3', '4 5']
    """
    count = len(stream.tasks)
    check_task_range(stream.name, count, skip, tasks)
    chosen = stream.tasks[skip : None if tasks is None else skip + tasks]
    if len(chosen) == count:
        return stream
    called = f"{stream.name}, tasks {skip + 1} to {skip + len(chosen)}"
    return _only(replace(stream, name=called, tasks=chosen))


def check_task_range(name: str, count: int, skip: int = 0, tasks: int | None = None) -> None:
    """Refuse to leave out all of `count` tasks, or to take more than are left.

    Example:
        >>> check_task_range("digits", 5, skip=5)
        Traceback (most recent call last):
        ...
        mooring.errors.MooringError: skip=5 leaves nothing of digits, which has 5 tasks: skip fewer
    """
    if skip >= count:
        raise MooringError(f"skip={skip} leaves nothing of {name}, which has {count} tasks: skip fewer")
    if tasks is not None and skip + tasks > count:
        left = f"{count} tasks" + (f", {count - skip} after skipping {skip}" if skip else "")
        raise MooringError(f"tasks={tasks} is not allowed: {name} has {left}")


def merge_tasks(stream: Stream) -> Stream:
    """All tasks as one: every class of a cut by class, or all classes in every guise.

    Example:
        >>> from mooring.lab.streams import by_class, digits
        >>> stream = merge_tasks(by_class(digits(), 2))
        >>> len(stream.tasks), stream.outputs, len(stream.tasks[0].train)
        (1, 10, 1433)
    """
    splits = []
    for kind, split in (("train", stream.train), ("test", stream.test)):
        labels = split.labels.clone()
        for number, task in enumerate(stream.tasks):
            labels[getattr(task, kind)] += stream.head(number) * stream.outputs
        splits.append(Split(split.images, labels))
    heads = max(stream.head(number) for number in range(len(stream.tasks))) + 1
    train, test = (torch.cat([getattr(task, kind) for task in stream.tasks]) for kind in ("train", "test"))
    task = Task("all", train, test, tuple(range(heads * stream.outputs)))
    return Stream(f"{stream.name}, all at once", splits[0], splits[1], (task,), heads="one")


def limit_images(stream: Stream, limit: int) -> Stream:
    """At most `limit` training and test images in each task: the first of each class in turn, in their order.

    Example:
        >>> from mooring.lab.streams import by_class, digits
        >>> stream = limit_images(by_class(digits(), 2), 5)
        >>> stream.train.labels[stream.tasks[0].train].tolist()
        [0, 1, 0, 1, 0]
    """
    tasks = []
    for task in stream.tasks:
        train, test = (
            indices[_first_of_each(split.labels[indices], limit)]
            for split, indices in ((stream.train, task.train), (stream.test, task.test))
        )
        tasks.append(Task(task.name, train, test, task.classes))
    return _only(replace(stream, name=f"{stream.name}, at most {limit} images a task", tasks=tuple(tasks)))


def limit_source(source: Source, limit: int) -> Source:
    """The same for a source whose every task has all its images: before they are multiplied.

    Example:
        >>> from mooring.lab.streams import digits
        >>> len(limit_source(digits(), 100).train)
        100
    """
    chosen = [_first_of_each(split.labels, limit) for split in (source.train, source.test)]
    splits = [_taken(split, where) for split, where in zip((source.train, source.test), chosen, strict=True)]
    return Source(f"{source.name}, at most {limit} images a task", splits[0], splits[1], source.classes)


def _first_of_each(labels: Tensor, limit: int) -> Tensor:
    """Where the first of each label, then the second of each, and so on are, up to `limit`; in ascending order."""
    turn = torch.zeros_like(labels)
    for label in range(int(labels.max()) + 1 if len(labels) else 0):
        mine = labels == label
        turn[mine] = torch.arange(int(mine.sum()))
    order = torch.argsort(turn * (int(labels.max()) + 1) + labels if len(labels) else turn)
    return order[:limit].sort().values


def _taken(split: Split, where: Tensor) -> Split:
    return Split(split.images[where], split.labels[where])


def _only(stream: Stream) -> Stream:
    """The same tasks over a memory that holds nothing else: what is not used is neither moved nor fingerprinted."""
    splits, moves = [], []
    for kind, split in (("train", stream.train), ("test", stream.test)):
        wanted = torch.zeros(len(split), dtype=torch.bool)
        wanted[torch.cat([getattr(task, kind) for task in stream.tasks])] = True
        used = wanted.nonzero().flatten()
        splits.append(split if len(used) == len(split) else _taken(split, used))
        moves.append(_move(used))
    tasks = tuple(Task(task.name, moves[0](task.train), moves[1](task.test), task.classes) for task in stream.tasks)
    return replace(stream, train=splits[0], test=splits[1], tasks=tasks)


def _move(used: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda indices: torch.searchsorted(used, indices)
