"""Random images with the shape of CIFAR's: how long a step takes does not depend on what is seen."""

import torch
from torch import Tensor

from mooring.lab.streams import Source, Split, Stream, Task, by_class
from mooring.lab.streams.named_datasets import NAMED_DATASETS

__all__ = ["cifar100", "noise"]


def noise(batch: int, steps: int) -> Stream:
    """Two tasks of so many steps, 10 classes, one head."""
    count = steps * batch
    generator = torch.Generator().manual_seed(0)
    split = Split(_images(2 * count, generator), torch.randint(0, 10, (2 * count,), generator=generator))
    parts = [torch.arange(number * count, (number + 1) * count) for number in (0, 1)]
    tasks = tuple(Task(str(number), part, part[:20], tuple(range(10))) for number, part in enumerate(parts))
    return Stream("noise", split, split, tasks, heads="one")


def cifar100() -> Stream:
    """As many images as CIFAR-100 has, in as many classes, cut as the paper cuts it: 10 tasks of 10 classes."""
    named, generator = NAMED_DATASETS["cifar100"], torch.Generator().manual_seed(0)
    splits = [
        Split(_images(count, generator), torch.arange(count) % named.classes) for count in (named.train, named.test)
    ]
    classes = tuple(str(label) for label in range(named.classes))
    return by_class(Source("noise like cifar100", splits[0], splits[1], classes), named.per_task)


def _images(count: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=generator)
