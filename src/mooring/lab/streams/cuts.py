"""Ways to cut a source into a stream: by class, or by what is done to the inputs."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from mooring.errors import MooringError, check_whole
from mooring.lab.streams.stream import Source, Split, Stream, Task

__all__ = ["by_class", "check_per_task", "permuted", "rotated"]


def by_class(source: Source, per_task: int, *, shuffle: int | None = None) -> Stream:
    """Some classes in each task, with a head for each.

    Args:
        source: the data set.
        per_task: how many classes a task has; must divide the number of classes.
        shuffle: None takes the classes in order; a seed shuffles them first.

    Example:
        >>> from mooring.lab.streams.digits import digits
        >>> [task.classes for task in by_class(digits(), per_task=5).tasks]
        [(0, 1, 2, 3, 4), (5, 6, 7, 8, 9)]
    """
    count = len(source.classes)
    check_per_task(source.name, count, per_task)
    order = list(range(count))
    if shuffle is not None:
        order = torch.randperm(count, generator=torch.Generator().manual_seed(shuffle)).tolist()
    rank = torch.empty(count, dtype=torch.int64)
    rank[torch.tensor(order)] = torch.arange(count)
    train, test = (Split(s.images, rank[s.labels] % per_task) for s in (source.train, source.test))
    tasks = []
    for number in range(count // per_task):
        classes = tuple(order[number * per_task : (number + 1) * per_task])
        where = [(rank[s.labels] // per_task == number).nonzero().flatten() for s in (source.train, source.test)]
        tasks.append(Task(" ".join(source.classes[c] for c in classes), where[0], where[1], classes))
    how = f"{per_task} classes a task" + ("" if shuffle is None else f", shuffled by {shuffle}")
    return Stream(f"{source.name} ({how})", train, test, tuple(tasks), heads="per task")


def check_per_task(name: str, count: int, per_task: int) -> None:
    """Refuse a number of classes in a task that does not divide the number of classes.

    Example:
        >>> check_per_task("digits", 10, 3)
        Traceback (most recent call last):
        ...
        mooring.errors.MooringError: digits has 10 classes, which 3 does not divide: take 1, 2, 5, 10
    """
    if per_task < 1 or count % per_task:
        divisors = ", ".join(str(k) for k in range(1, count + 1) if count % k == 0)
        raise MooringError(f"{name} has {count} classes, which {per_task} does not divide: take {divisors}")


def permuted(source: Source, tasks: int, *, seed: int = 0) -> Stream:
    """The same classes in each task, the pixels in another fixed order; one head. The first task's are in order.

    Example:
        >>> from mooring.lab.streams.digits import digits
        >>> permuted(digits(), tasks=3).heads
        'one'
    """
    check_whole("tasks", tasks, 1)
    pixels = math.prod(source.train.images.shape[2:])
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.arange(pixels), *(torch.randperm(pixels, generator=generator) for _ in range(tasks - 1))]
    views = [partial(permute, order=order) for order in orders]
    names = [f"permutation {task}" for task in range(tasks)]
    return _by_domain(source, views, f"{source.name} ({tasks} permutations, seed {seed})", names)


def rotated(source: Source, tasks: int, *, degrees: float = 180.0) -> Stream:
    """The same classes in each task, turned by equal angles from 0 up to (not including) `degrees`; one head.

    Bilinear, with what comes into the picture from outside black.

    Example:
        >>> from mooring.lab.streams.digits import digits
        >>> [task.name for task in rotated(digits(), tasks=3, degrees=90).tasks]
        ['turned by 0°', 'turned by 30°', 'turned by 60°']
    """
    check_whole("tasks", tasks, 1)
    angles = [task * degrees / tasks for task in range(tasks)]
    views = [partial(rotate, degrees=angle) for angle in angles]
    names = [f"turned by {angle:g}°" for angle in angles]
    return _by_domain(source, views, f"{source.name} ({tasks} rotations within {degrees:g}°)", names)


def permute(images: Tensor, order: Tensor) -> Tensor:
    """The pixels of each image in another order, the same in every channel.

    Example:
        >>> permute(torch.tensor([[[[1, 2], [3, 4]]]], dtype=torch.uint8), torch.tensor([3, 2, 1, 0]))[0, 0].tolist()
        [[4, 3], [2, 1]]
    """
    return images.flatten(2)[:, :, order].reshape(images.shape)


def rotate(images: Tensor, degrees: float) -> Tensor:
    """uint8 images turned counter-clockwise about their centres, bilinear, black outside.

    Example:
        >>> corner = torch.zeros(1, 1, 3, 3, dtype=torch.uint8)
        >>> corner[0, 0, 0, 2] = 255
        >>> rotate(corner, 90.0)[0, 0].tolist()
        [[255, 0, 0], [0, 0, 0], [0, 0, 0]]
    """
    if degrees % 360 == 0:
        return images.clone()
    angle = math.radians(degrees)
    matrix = torch.tensor([[math.cos(angle), -math.sin(angle), 0.0], [math.sin(angle), math.cos(angle), 0.0]])
    turned = []
    for part in torch.split(images, 4096):
        grid = torch.nn.functional.affine_grid(matrix.expand(len(part), 2, 3), list(part.shape), align_corners=False)
        turned.append(torch.nn.functional.grid_sample(part.float(), grid, align_corners=False).round().to(torch.uint8))
    return torch.cat(turned)


def _by_domain(source: Source, views: Sequence[Callable[[Tensor], Tensor]], name: str, names: list[str]) -> Stream:
    """One task for each view of all the images, the views one after the other in memory."""
    splits, indices = [], []
    for split in (source.train, source.test):
        images = torch.cat([view(split.images) for view in views])
        splits.append(Split(images, split.labels.repeat(len(views))))
        indices.append(torch.arange(len(images)).reshape(len(views), len(split)))
    classes = tuple(range(len(source.classes)))
    tasks = tuple(Task(task, train, test, classes) for task, train, test in zip(names, *indices, strict=True))
    return Stream(name, splits[0], splits[1], tasks, heads="one")
