"""What a problem of the gauntlet is: a network, and a world that examples of each task are drawn from."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Generator, Tensor

from gauntlet_problems.small_networks import HeadedNetwork

Examples = tuple[Tensor, Tensor]
"""Inputs and labels."""

Part = Literal["old", "fresh", "new", "test"]
"""What was trained on before, unseen inputs of the same kind, what is trained on now, and what is tested on."""

World = Callable[[int, Part, int, Generator], Examples]
"""Draws examples: world(task, part, count, generator). Task 0 is the old one."""

Relation = Literal["compatible", "partial conflict", "conflict"]
"""Whether new labels contradict old ones: on no inputs, on inputs of some classes or places, or on all."""


@dataclass(frozen=True)
class GauntletProblem:
    """An old task, new tasks, and the network that learns them.

    Attributes:
        name: its name; the first word is the kind of data.
        relation: whether new labels contradict old ones.
        build: makes the network, with random weights.
        world: makes the world of a seed.
        tasks: the number of new tasks that there are.
        adaptable: whether linear layers do the work, so that adapters of them can learn.
    """

    name: str
    relation: Relation
    build: Callable[[], HeadedNetwork]
    world: Callable[[Generator], World]
    tasks: int = 5
    adaptable: bool = True

    @property
    def kind(self) -> str:
        """The kind of data: "digits", "pictures", "table", "text" or "sequence"."""
        return self.name.partition("-")[0]


def drawn_by_class(
    classes: int, count: int, generator: Generator, draw: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Return what is drawn for random classes, and the classes."""
    labels = torch.randint(classes, (count,), generator=generator)
    return draw(labels), labels


def other_labels(classes: int, task: int, among: int | None = None) -> Tensor:
    """Return the label that each class has in a task: a rotation of the first `among` classes, by default of all.

    Example:
        >>> other_labels(5, 1), other_labels(5, 1, among=2)
        (tensor([1, 2, 3, 4, 0]), tensor([1, 0, 2, 3, 4]))
    """
    turned = among or classes
    return torch.cat([(torch.arange(turned) + task) % turned, torch.arange(turned, classes)])


def random_directions(count: int, size: int, generator: Generator) -> Tensor:
    """Return vectors of length sqrt(size) in expectation."""
    return torch.randn(count, size, generator=generator)


def angles(count: int, generator: Generator) -> Tensor:
    """Return phases between 0 and 2 pi."""
    return 2 * math.pi * torch.rand(count, generator=generator)
