"""Parts of a stream: some of its tasks or of its images, without the memory of the others."""

from dataclasses import replace

import torch
from torch import Tensor

from mooring.errors import MooringError
from mooring_lab.streams.stream import Source, Split, Stream, Task, rank_in_class, task_outputs

HELD_OUT_SHARE = 0.2
"""The share of the training images that settings are chosen on."""


def select_tasks(stream: Stream, skip: int = 0, tasks: int | None = None) -> Stream:
    """Return the stream without its first `skip` tasks and with at most `tasks` of the following ones.

    Example:
        >>> from mooring_lab.streams import by_class, digits
        >>> [task.name for task in select_tasks(by_class(digits(), 2), skip=1, tasks=2).tasks]
        ['2 3', '4 5']
    """
    count = len(stream.tasks)
    check_task_range(stream.name, count, skip, tasks)
    chosen = stream.tasks[skip : None if tasks is None else skip + tasks]
    if len(chosen) == count:
        return stream
    name = f"{stream.name}, tasks {skip + 1} to {skip + len(chosen)}"
    return _drop_unused_images(replace(stream, name=name, tasks=chosen))


def check_task_range(name: str, count: int, skip: int = 0, tasks: int | None = None) -> None:
    """Raise an error if `skip` leaves none of `count` tasks, or if fewer than `tasks` are left.

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
    """Return a stream with one task that has the images and classes of all tasks.

    Example:
        >>> from mooring_lab.streams import by_class, digits
        >>> stream = merge_tasks(by_class(digits(), 2))
        >>> len(stream.tasks), stream.outputs, len(stream.tasks[0].train)
        (1, 10, 1433)
    """
    splits = []
    for kind, split in (("train", stream.train), ("test", stream.test)):
        labels = task_outputs(stream, kind).clone()
        for number, task in enumerate(stream.tasks):
            labels[getattr(task, kind)] += stream.head(number) * stream.outputs
        splits.append(Split(split.images, labels))
    train, test = (torch.cat([getattr(task, kind) for task in stream.tasks]) for kind in ("train", "test"))
    task = Task("all", train, test, tuple(range(stream.head_count * stream.outputs)))
    return Stream(f"{stream.name}, all at once", splits[0], splits[1], (task,), scenario="domain")


def hold_out(stream: Stream, share: float = HELD_OUT_SHARE) -> Stream:
    """Return a stream that scores a share of the training images, the last of each class, and trains on the others.

    It has no test image of the stream, so that a setting can be chosen on it. Tasks that are transformations of the
    same images hold out the same ones. A class with two or more training images has at least one that is held out.

    Example:
        >>> from mooring_lab.streams import by_class, digits
        >>> stream = by_class(digits(), 2)
        >>> held = hold_out(stream)
        >>> len(stream.train), len(held.train), len(held.test)
        (1433, 1146, 287)
    """
    tasks = []
    for task in stream.tasks:
        labels = stream.train.labels[task.train]
        counts = torch.bincount(labels)
        kept = (counts - (share * counts).round().clamp(min=1)).clamp(min=1)
        held = rank_in_class(labels) >= kept[labels]
        tasks.append(replace(task, train=task.train[~held], test=task.train[held]))
    name = f"{stream.name}, held-out training images"
    return _drop_unused_images(replace(stream, name=name, test=stream.train, tasks=tuple(tasks)))


def limit_images(stream: Stream, limit: int) -> Stream:
    """Keep at most `limit` training images and `limit` test images per task, evenly over the classes, first ones first.

    Example:
        >>> from mooring_lab.streams import by_class, digits
        >>> stream = limit_images(by_class(digits(), 2), 5)
        >>> stream.train.labels[stream.tasks[0].train].tolist()
        [0, 1, 0, 1, 0]
    """
    tasks = []
    for task in stream.tasks:
        train = task.train[_first_of_each_class(stream.train.labels[task.train], limit)]
        test = task.test[_first_of_each_class(stream.test.labels[task.test], limit)]
        tasks.append(replace(task, train=train, test=test))
    name = f"{stream.name}, at most {limit} images a task"
    return _drop_unused_images(replace(stream, name=name, tasks=tuple(tasks)))


def limit_source(source: Source, limit: int) -> Source:
    """Keep at most `limit` images per split of a data set, for cuts in which every task has all images.

    Example:
        >>> from mooring_lab.streams import digits
        >>> len(limit_source(digits(), 100).train)
        100
    """
    train, test = (_subset(split, _first_of_each_class(split.labels, limit)) for split in (source.train, source.test))
    return Source(f"{source.name}, at most {limit} images a task", train, test, source.classes)


def _first_of_each_class(labels: Tensor, limit: int) -> Tensor:
    """Return `limit` indices in ascending order: the first of each class, then the second of each class, and so on."""
    classes = int(labels.max()) + 1 if len(labels) else 0
    return torch.argsort(rank_in_class(labels) * classes + labels)[:limit].sort().values


def _subset(split: Split, indices: Tensor) -> Split:
    return Split(split.images[indices], split.labels[indices])


def _drop_unused_images(stream: Stream) -> Stream:
    """Return the same tasks without the images that no task uses; they need no memory and no fingerprint."""
    splits: dict[str, Split] = {}
    indices: dict[str, list[Tensor]] = {}
    for kind, split in (("train", stream.train), ("test", stream.test)):
        used = torch.unique(torch.cat([getattr(task, kind) for task in stream.tasks]))
        splits[kind] = split if len(used) == len(split) else _subset(split, used)
        indices[kind] = [torch.searchsorted(used, getattr(task, kind)) for task in stream.tasks]
    tasks = tuple(
        replace(task, train=train, test=test)
        for task, train, test in zip(stream.tasks, indices["train"], indices["test"], strict=True)
    )
    return replace(stream, train=splits["train"], test=splits["test"], tasks=tasks)
