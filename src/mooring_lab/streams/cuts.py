"""Cuts of a data set into tasks: by class, or by a transformation of the images."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from mooring.errors import MooringError, check_whole
from mooring_lab.streams.stream import Source, Split, Stream, Task


def by_class(source: Source, per_task: int, *, shuffle: int | None = None) -> Stream:
    """Cut a data set into tasks with different classes and, unless another scenario is chosen, one head per task.

    Args:
        source: the data set.
        per_task: the number of classes of a task; it must divide the number of classes.
        shuffle: the seed that shuffles the classes; None keeps them in order.

    Example:
        >>> from mooring_lab.streams.digits import digits
        >>> [task.classes for task in by_class(digits(), per_task=5).tasks]
        [(0, 1, 2, 3, 4), (5, 6, 7, 8, 9)]
    """
    count = len(source.classes)
    check_per_task(source.name, count, per_task)
    order = list(range(count))
    if shuffle is not None:
        order = torch.randperm(count, generator=torch.Generator().manual_seed(shuffle)).tolist()
    rank = torch.tensor(order).argsort()
    train, test = (Split(split.images, rank[split.labels] % per_task) for split in (source.train, source.test))
    tasks = []
    for number in range(count // per_task):
        classes = tuple(order[number * per_task : (number + 1) * per_task])
        train_indices, test_indices = (
            (rank[split.labels] // per_task == number).nonzero().flatten() for split in (source.train, source.test)
        )
        tasks.append(Task(" ".join(source.classes[c] for c in classes), train_indices, test_indices, classes))
    cut = f"{per_task} classes a task" + ("" if shuffle is None else f", shuffled by {shuffle}")
    return Stream(f"{source.name} ({cut})", train, test, tuple(tasks), scenario="task")


def check_per_task(name: str, count: int, per_task: int) -> None:
    """Raise an error unless the number of classes of a task divides the number of classes.

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
    """Return a stream in which every task has all classes and its own fixed order of pixels, with one head.

    The first task keeps the original order.

    Example:
        >>> from mooring_lab.streams.digits import digits
        >>> permuted(digits(), tasks=3).scenario
        'domain'
    """
    check_whole("tasks", tasks, 1)
    pixels = math.prod(source.train.images.shape[2:])
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.arange(pixels), *(torch.randperm(pixels, generator=generator) for _ in range(tasks - 1))]
    transforms = [partial(permute, order=order) for order in orders]
    names = [f"permutation {task}" for task in range(tasks)]
    return _by_transform(source, transforms, f"{source.name} ({tasks} permutations, seed {seed})", names)


def rotated(source: Source, tasks: int, *, degrees: float = 180.0) -> Stream:
    """Return a stream in which every task has all classes, rotated by its own angle, with one head.

    The angles are evenly spaced from 0 up to, but not including, `degrees`. Rotation is bilinear, with black outside.

    Example:
        >>> from mooring_lab.streams.digits import digits
        >>> [task.name for task in rotated(digits(), tasks=3, degrees=90).tasks]
        ['rotated by 0°', 'rotated by 30°', 'rotated by 60°']
    """
    check_whole("tasks", tasks, 1)
    angles = [task * degrees / tasks for task in range(tasks)]
    transforms = [partial(rotate, degrees=angle) for angle in angles]
    names = [f"rotated by {angle:g}°" for angle in angles]
    return _by_transform(source, transforms, f"{source.name} ({tasks} rotations within {degrees:g}°)", names)


def permute(images: Tensor, order: Tensor) -> Tensor:
    """Reorder the pixels of each image, in the same way in every channel.

    Example:
        >>> permute(torch.tensor([[[[1, 2], [3, 4]]]], dtype=torch.uint8), torch.tensor([3, 2, 1, 0]))[0, 0].tolist()
        [[4, 3], [2, 1]]
    """
    return images.flatten(2)[:, :, order].reshape(images.shape)


def rotate(images: Tensor, degrees: float) -> Tensor:
    """Rotate uint8 images counter-clockwise about their centers, bilinearly, with black outside.

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
    rotated_parts = []
    for part in torch.split(images, 4096):
        grid = torch.nn.functional.affine_grid(matrix.expand(len(part), 2, 3), list(part.shape), align_corners=False)
        pixels = torch.nn.functional.grid_sample(part.float(), grid, align_corners=False)
        rotated_parts.append(pixels.round().to(torch.uint8))
    return torch.cat(rotated_parts)


def _by_transform(
    source: Source, transforms: Sequence[Callable[[Tensor], Tensor]], name: str, names: list[str]
) -> Stream:
    """Return a stream with one task per transformation of all images."""
    splits, indices = [], []
    for split in (source.train, source.test):
        images = torch.cat([transform(split.images) for transform in transforms])
        splits.append(Split(images, split.labels.repeat(len(transforms))))
        indices.append(torch.arange(len(images)).reshape(len(transforms), len(split)))
    classes = tuple(range(len(source.classes)))
    tasks = tuple(Task(task, train, test, classes) for task, train, test in zip(names, *indices, strict=True))
    return Stream(name, splits[0], splits[1], tasks, scenario="domain")
