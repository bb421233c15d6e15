"""A stream: tasks that come one after the other, as index lists into one memory of images."""

import hashlib
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from mooring.errors import MooringError

__all__ = ["Source", "Split", "Stream", "Task"]


@dataclass(frozen=True)
class Split:
    """Images and their labels, in a fixed order.

    Attributes:
        images: uint8 of shape (n, channels, height, width).
        labels: int64 of shape (n,).
    """

    images: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        """Refuse what is not images with a label each."""
        if self.images.dtype != torch.uint8 or self.images.ndim != 4:
            shape = tuple(self.images.shape)
            raise MooringError(
                f"images must be uint8 of shape (n, channels, height, width), not {self.images.dtype} {shape}"
            )
        if self.labels.dtype != torch.int64 or self.labels.shape != self.images.shape[:1]:
            raise MooringError(f"{len(self.images)} images need as many int64 labels, not {tuple(self.labels.shape)}")

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Source:
    """A data set before it is cut into tasks.

    Attributes:
        name: what it is called.
        train: what is learned from.
        test: what is scored on.
        classes: the name of each label.
    """

    name: str
    train: Split
    test: Split
    classes: tuple[str, ...]

    def __post_init__(self) -> None:
        """Refuse labels that have no class."""
        for split in (self.train, self.test):
            if len(split) and not 0 <= int(split.labels.min()) <= int(split.labels.max()) < len(self.classes):
                raise MooringError(f"{self.name} has labels outside its {len(self.classes)} classes")


@dataclass(frozen=True)
class Task:
    """One task: where its images are in the stream's memory, and what they are to be told apart as.

    Attributes:
        name: for people.
        train: indices into the training memory.
        test: indices into the test memory.
        classes: the source's labels in this task; the first is learned as 0, and so on.
    """

    name: str
    train: Tensor
    test: Tensor
    classes: tuple[int, ...]


@dataclass(frozen=True)
class Stream:
    """Tasks over one memory of training images and one of test images.

    Attributes:
        name: what it is called.
        train: the training memory; labels are those to be learned, 0 .. classes of its task - 1.
        test: the test memory.
        tasks: the tasks, in order.
        heads: "per task", or "one" for all.
    """

    name: str
    train: Split
    test: Split
    tasks: tuple[Task, ...]
    heads: str

    def __post_init__(self) -> None:
        """Refuse a task that there is nothing to learn or score in."""
        for task in self.tasks:
            for kind, indices in (("training", task.train), ("test", task.test)):
                if not len(indices):
                    raise MooringError(f"{self.name}: task {task.name!r} has no {kind} images")

    @property
    def outputs(self) -> int:
        """How many classes a head tells apart: those of the largest task."""
        return max(len(task.classes) for task in self.tasks)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        channels, height, width = self.train.images.shape[1:]
        return channels, height, width

    @property
    def head_count(self) -> int:
        """The number of heads."""
        return len(self.tasks) if self.heads == "per task" else 1

    def head(self, task: int) -> int:
        """Return the number of the head that a task uses."""
        return task if self.heads == "per task" else 0

    @cached_property
    def fingerprint(self) -> str:
        """A name for what is learned and scored: images, labels, tasks and heads, and not what they are called.

        Example:
            >>> from mooring.lab.streams import by_class, digits
            >>> by_class(digits(), 2).fingerprint == by_class(digits(), 2).fingerprint
            True
            >>> by_class(digits(), 2).fingerprint == by_class(digits(), 5).fingerprint
            False
        """
        digest = hashlib.blake2b(digest_size=16)
        digest.update(repr((self.heads, [task.classes for task in self.tasks])).encode())
        tensors = [tensor for split in (self.train, self.test) for tensor in (split.images, split.labels)]
        tensors += [indices for task in self.tasks for indices in (task.train, task.test)]
        for tensor in tensors:
            digest.update(repr((tensor.dtype, tuple(tensor.shape))).encode())
            # the buffer itself: memory-mapped images are read through, not copied
            digest.update(tensor.detach().cpu().contiguous().numpy().data)
        return digest.hexdigest()
