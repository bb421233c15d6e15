"""A stream: a sequence of tasks, which are lists of indices into shared images."""

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from mooring.errors import MooringError, unknown
from mooring_lab.model.scenarios import SCENARIOS

HEADS = {"task": "per task", "class": "growing", "domain": "one"}
"""What heads a stream has, by its scenario; part of the fingerprint."""


@dataclass(frozen=True)
class Split:
    """Images and labels in a fixed order.

    Attributes:
        images: uint8 of shape (n, channels, height, width).
        labels: int64 of shape (n,).
    """

    images: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        """Check dtypes and shapes."""
        if self.images.dtype != torch.uint8 or self.images.ndim != 4:
            given = f"{self.images.dtype} {tuple(self.images.shape)}"
            raise MooringError(f"images must be uint8 of shape (n, channels, height, width), not {given}")
        if self.labels.dtype != torch.int64 or self.labels.shape != self.images.shape[:1]:
            raise MooringError(f"{len(self.images)} images need as many int64 labels, not {tuple(self.labels.shape)}")

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Source:
    """A data set that is not yet cut into tasks.

    Attributes:
        name: the data set's name.
        train: the training images.
        test: the test images.
        classes: the name of each class, by label.
    """

    name: str
    train: Split
    test: Split
    classes: tuple[str, ...]

    def __post_init__(self) -> None:
        """Check that every label has a class."""
        for split in (self.train, self.test):
            if len(split) and not 0 <= int(split.labels.min()) <= int(split.labels.max()) < len(self.classes):
                raise MooringError(f"{self.name} has labels outside its {len(self.classes)} classes")


@dataclass(frozen=True)
class Task:
    """One task of a stream.

    Attributes:
        name: the task's name; it is only shown.
        train: the indices of its training images in the stream.
        test: the indices of its test images in the stream.
        classes: the source's labels of its classes; the first is learned as 0, the second as 1, and so on.
    """

    name: str
    train: Tensor
    test: Tensor
    classes: tuple[int, ...]


@dataclass(frozen=True)
class Stream:
    """A sequence of tasks that share their training images and their test images.

    Attributes:
        name: the stream's name.
        train: the training images of all tasks; labels count from 0 within each task.
        test: the test images of all tasks.
        tasks: the tasks, in order.
        scenario: "task" for one head per task, "class" for one head that grows by the classes of each task, "domain"
            for one head for all tasks.
    """

    name: str
    train: Split
    test: Split
    tasks: tuple[Task, ...]
    scenario: str

    def __post_init__(self) -> None:
        """Check the scenario, and that every task has training and test images."""
        if self.scenario not in SCENARIOS:
            raise unknown("scenario", self.scenario, SCENARIOS)
        for task in self.tasks:
            for kind, indices in (("training", task.train), ("test", task.test)):
                if not len(indices):
                    raise MooringError(f"{self.name}: task {task.name!r} has no {kind} images")

    @property
    def heads(self) -> str:
        """The heads that the scenario asks for: "per task", "growing" or "one"."""
        return HEADS[self.scenario]

    @property
    def outputs(self) -> int:
        """The number of outputs of a head: the number of classes of the largest task, or of all tasks if it grows."""
        return self.grown_outputs(len(self.tasks) - 1)

    def grown_outputs(self, task: int) -> int:
        """Return how many outputs a head has while a task is trained; only a growing head has not all from the start.

        Example:
            >>> from mooring_lab.streams import by_class, digits
            >>> [replace(by_class(digits(), 2), scenario=name).grown_outputs(1) for name in ("task", "class")]
            [2, 4]
        """
        if self.heads == "growing":
            return sum(len(part.classes) for part in self.tasks[: task + 1])
        return max(len(part.classes) for part in self.tasks)

    def first_output(self, task: int) -> int:
        """Return the output of a task's first class; the outputs of its other classes follow."""
        return self.grown_outputs(task) - len(self.tasks[task].classes) if self.heads == "growing" else 0

    @property
    def shape(self) -> tuple[int, int, int]:
        """The channels, height and width of an image."""
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
        """The hash of images, labels, tasks and heads; names are not part of it.

        Example:
            >>> from mooring_lab.streams import by_class, digits
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
            # hash the buffer itself, so that memory-mapped images are not copied
            digest.update(tensor.detach().cpu().contiguous().numpy().data)
        return digest.hexdigest()


def in_scenario(stream: Stream, scenario: str) -> Stream:
    """Return the same tasks in another scenario; its name says which.

    Example:
        >>> from mooring_lab.streams import by_class, digits
        >>> in_scenario(by_class(digits(), per_task=2), "class").outputs
        10
    """
    if scenario == "class":
        for kind in ("train", "test"):
            indices = torch.cat([getattr(task, kind) for task in stream.tasks])
            if len(indices) > len(torch.unique(indices)):
                raise MooringError(
                    f"{stream.name} has images that belong to several tasks, and a growing head needs one class for "
                    "each: give scenario='task' or scenario='domain'"
                )
    return replace(stream, scenario=scenario)


def task_outputs(stream: Stream, kind: str) -> Tensor:
    """Return the output of each image's class, for the "train" or the "test" images.

    Labels count from 0 within each task; the outputs of a growing head count from 0 over all tasks.

    Example:
        >>> from mooring_lab.streams import by_class, digits
        >>> stream = in_scenario(by_class(digits(), per_task=2), "class")
        >>> bool((task_outputs(stream, "test") == digits().test.labels).all())
        True
    """
    outputs = getattr(stream, kind).labels
    if stream.heads != "growing":
        return outputs  # type: ignore[no-any-return]
    outputs = outputs.clone()
    for number, task in enumerate(stream.tasks):
        outputs[getattr(task, kind)] += stream.first_output(number)
    return outputs  # type: ignore[no-any-return]


def rank_in_class(labels: Tensor) -> Tensor:
    """Return the number of earlier samples with the same label, for each sample.

    Example:
        >>> rank_in_class(torch.tensor([5, 3, 5, 5])).tolist()
        [0, 0, 1, 2]
    """
    rank = torch.zeros_like(labels)
    for label in set(labels.tolist()):
        in_class = labels == label
        rank[in_class] = torch.arange(int(in_class.sum()))
    return rank
