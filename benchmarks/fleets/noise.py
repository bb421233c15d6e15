"""Streams of random images with the shape of CIFAR's; the time of a step does not depend on the images."""

import torch
from torch import Tensor

from mooring_lab.streams import Source, Split, Stream, Task, by_class
from mooring_lab.streams.named_datasets import NAMED_DATASETS

__all__ = ["cifar100", "noise"]


def noise(batch: int, steps: int) -> Stream:
    """Return two tasks with that many steps, 10 classes and one head."""
    count = steps * batch
    generator = torch.Generator().manual_seed(0)
    split = Split(_images(2 * count, generator), torch.randint(0, 10, (2 * count,), generator=generator))
    indices = [torch.arange(number * count, (number + 1) * count) for number in (0, 1)]
    tasks = tuple(
        Task(str(number), task_indices, task_indices[:20], tuple(range(10)))
        for number, task_indices in enumerate(indices)
    )
    return Stream("noise", split, split, tasks, scenario="domain")


def cifar100() -> Stream:
    """Return random images with the counts, classes and tasks of CIFAR-100 in the paper: 10 tasks of 10 classes."""
    dataset, generator = NAMED_DATASETS["cifar100"], torch.Generator().manual_seed(0)
    splits = [
        Split(_images(count, generator), torch.arange(count) % dataset.classes)
        for count in (dataset.train, dataset.test)
    ]
    classes = tuple(str(label) for label in range(dataset.classes))
    return by_class(Source("noise like cifar100", splits[0], splits[1], classes), dataset.per_task)


def _images(count: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=generator)
