"""Problems of images with 8 by 8 pixels: handwritten digits, stripes and spots."""

import math
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Generator, Tensor, nn

from gauntlet_problems.problem_definition import Examples, GauntletProblem, Part, World, angles, other_labels
from gauntlet_problems.small_networks import HeadedNetwork, convolutions, perceptron

POOLS: dict[Part, tuple[int, int]] = {"old": (0, 700), "fresh": (700, 1400), "new": (0, 1400), "test": (1400, 1797)}
"""Which of the digits are drawn from."""

TURNS = 8
"""The number of ways to turn and mirror an image."""


@lru_cache
def stored_digits() -> Examples:
    """Return the images, (1797, 1, 8, 8) between 0 and 1, and the labels."""
    from sklearn.datasets import load_digits  # slow to import, and other problems do not need it

    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(labels)


def draw_digits(part: Part, count: int, generator: Generator, classes: range = range(10)) -> Examples:
    """Return digits of some classes, each moved sideways by at most a pixel."""
    images, labels = stored_digits()
    first, last = POOLS[part]
    pool = torch.arange(first, last)
    pool = pool[(labels[pool] >= classes.start) & (labels[pool] < classes.stop)]
    chosen = pool[torch.randint(len(pool), (count,), generator=generator)]
    moves = torch.randint(3, (count,), generator=generator)
    moved = torch.empty(count, 1, 8, 8)
    for move in range(3):
        moved[moves == move] = images[chosen[moves == move]].roll(move - 1, 3)
    return moved, labels[chosen]


def turned(images: Tensor, turn: int) -> Tensor:
    """Return images turned by a multiple of 90 degrees, and mirrored from the fifth on."""
    images = images.rot90(turn % 4, (2, 3))
    return images.flip(3) if turn >= TURNS // 2 else images


def turned_digits(_: Generator) -> World:
    """Digits, and the same turned and mirrored."""

    def world(task: int, part: Part, count: int, generator: Generator) -> Examples:
        images, labels = draw_digits(part, count, generator)
        return turned(images, task), labels

    return world


def permuted_digits(structure: Generator) -> World:
    """Digits, and the same with their pixels in another order."""
    orders = [torch.arange(64), *(torch.randperm(64, generator=structure) for _ in range(5))]

    def world(task: int, part: Part, count: int, generator: Generator) -> Examples:
        images, labels = draw_digits(part, count, generator)
        return images.flatten(1)[:, orders[task]].view(-1, 1, 8, 8), labels

    return world


def new_digits(_: Generator) -> World:
    """Digits from 0 to 4, and then those from 5 to 9."""

    def world(task: int, part: Part, count: int, generator: Generator) -> Examples:
        return draw_digits("new" if part != "test" and task else part, count, generator, range(5 * task, 5 * task + 5))

    return world


def grouped_digits(structure: Generator) -> World:
    """Digits, and for each new task three groups of the turned digits."""
    groups = [torch.randperm(10, generator=structure) % 3 for _ in range(5)]

    def world(task: int, part: Part, count: int, generator: Generator) -> Examples:
        images, labels = draw_digits(part, count, generator)
        return (turned(images, task), groups[task - 1][labels]) if task else (images, labels)

    return world


def relabelled_digits(_: Generator) -> World:
    """Digits, and the same with the labels of four of them exchanged."""

    def world(task: int, part: Part, count: int, generator: Generator) -> Examples:
        images, labels = draw_digits(part, count, generator)
        return images, other_labels(10, task % 4, among=4)[labels] if task else labels

    return world


def stripes(_: Generator, conflict: bool = False) -> World:
    """Stripes of eight directions, and then finer ones, or the same with other labels of half of the directions."""
    rows, columns = torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")

    def world(task: int, part: Part, count: int, generator: Generator) -> Examples:
        direction = torch.randint(8, (count,), generator=generator)
        angle = (math.pi * direction / 8)[:, None, None]
        width = 0.8 + (0.0 if conflict else 0.3 * task)
        place = rows * angle.sin() + columns * angle.cos()
        waves = (width * place + angles(count, generator)[:, None, None]).sin()
        images = waves + 0.5 * torch.randn(count, 8, 8, generator=generator)
        labels = other_labels(8, task % 4, among=4)[direction] if conflict and task else direction
        return images[:, None], labels

    return world


def spots(_: Generator) -> World:
    """A spot in one of nine places; then wider, dark, or in front of slopes, with the places in another order."""
    rows, columns = torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")

    def world(task: int, part: Part, count: int, generator: Generator) -> Examples:
        place = torch.randint(9, (count,), generator=generator)
        jitter = 0.7 * torch.randn(2, count, generator=generator)
        y, x = 1.2 + 2.8 * (place // 3) + jitter[0], 1.2 + 2.8 * (place % 3) + jitter[1]
        distance = (rows - y[:, None, None]) ** 2 + (columns - x[:, None, None]) ** 2
        spot = 2 * (-distance / (1.5 + task)).exp() * (-1 if task % 2 else 1)
        images = spot + 0.15 * task * (rows - 3.5) + 0.4 * torch.randn(count, 8, 8, generator=generator)
        return images[:, None], (place + 2 * task) % 9

    return world


def small_cnn(classes: int, heads: int = 1, norm: Any = lambda width: nn.Identity()) -> HeadedNetwork:
    """Return a convolutional network."""
    return HeadedNetwork(convolutions(norm), 64, classes, heads)


def image_perceptron(classes: int, layers: int = 1) -> HeadedNetwork:
    """Return a perceptron on pixels."""
    return HeadedNetwork(perceptron(64, layers=layers), 100, classes)


PICTURE_PROBLEMS = (
    GauntletProblem("digits-turned", "compatible", partial(image_perceptron, 10), turned_digits),
    GauntletProblem("digits-permuted", "compatible", partial(image_perceptron, 10, 2), permuted_digits),
    GauntletProblem("digits-turned-cnn", "compatible", partial(small_cnn, 10), turned_digits, adaptable=False),
    GauntletProblem(
        "digits-batch-norm", "compatible", partial(small_cnn, 10, 1, nn.BatchNorm2d), turned_digits, 5, False
    ),
    GauntletProblem("digits-new-classes", "compatible", partial(small_cnn, 10), new_digits, 1, False),
    GauntletProblem("digits-new-heads", "compatible", partial(small_cnn, 10, 6), grouped_digits, adaptable=False),
    GauntletProblem("digits-relabelled", "partial conflict", partial(image_perceptron, 10), relabelled_digits, 3),
    GauntletProblem("pictures-stripes", "compatible", partial(small_cnn, 8), stripes, adaptable=False),
    GauntletProblem(
        "pictures-stripes-relabelled",
        "partial conflict",
        partial(image_perceptron, 8),
        partial(stripes, conflict=True),
        3,
    ),
    GauntletProblem("pictures-spots", "compatible", partial(image_perceptron, 9, 2), spots),
)
