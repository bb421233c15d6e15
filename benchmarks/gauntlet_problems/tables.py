"""Problems of rows with 16 numbers: clusters, and the labels of random teachers."""

from functools import partial

import torch
from torch import Generator, nn

from gauntlet_problems.problem_definition import Examples, GauntletProblem, Part, World, other_labels, random_directions
from gauntlet_problems.small_networks import HeadedNetwork, perceptron, residual_perceptron

SIZE, CLASSES, TASKS = 16, 8, 6


def clusters(structure: Generator, distance: float = 1.5, per_task: int = CLASSES, outputs: int = CLASSES) -> World:
    """Classes of two clusters each; a new task has other clusters.

    Args:
        structure: for the centres.
        distance: how far apart they are; near clusters of several tasks overlap, so that labels contradict.
        per_task: the number of classes of a task.
        outputs: the number of all classes; a task has the next ones.
    """
    centres = distance * torch.randn(TASKS, per_task, 2, SIZE, generator=structure)

    def world(task: int, part: Part, count: int, generator: Generator) -> Examples:
        labels = torch.randint(per_task, (count,), generator=generator)
        side = torch.randint(2, (count,), generator=generator)
        x = centres[task][labels, side] + torch.randn(count, SIZE, generator=generator)
        return x, (labels + task * per_task) % outputs

    return world


def relabelled_clusters(structure: Generator) -> World:
    """Clusters, and the same with all labels exchanged."""
    first = clusters(structure)

    def world(task: int, part: Part, count: int, generator: Generator) -> Examples:
        x, labels = first(0, part, count, generator)
        return x, other_labels(CLASSES, task)[labels]

    return world


def teachers(structure: Generator, shift: float = 2.0, classes: int = 4) -> World:
    """The labels of a random network on inputs around one place; a new task has another network and another place."""
    hidden = [random_directions(SIZE, 12, structure) / 2 for _ in range(TASKS)]
    outer = [random_directions(12, classes, structure) for _ in range(TASKS)]
    means = shift * torch.randn(TASKS, SIZE, generator=structure) / 2

    def world(task: int, part: Part, count: int, generator: Generator) -> Examples:
        noise = torch.randn(count, SIZE, generator=generator)
        return means[task] + noise, ((noise @ hidden[task]).tanh() @ outer[task]).argmax(1)

    return world


def table_network(classes: int, layers: int = 1, heads: int = 1) -> HeadedNetwork:
    """Return a perceptron."""
    return HeadedNetwork(perceptron(SIZE, layers=layers), 100, classes, heads)


def deep_table_network(classes: int) -> HeadedNetwork:
    """Return a residual network with layer norm and dropout."""
    return HeadedNetwork(residual_perceptron(SIZE), 64, classes)


def saturating_network(classes: int) -> HeadedNetwork:
    """Return a network with tanh instead of ReLU."""
    return HeadedNetwork(nn.Sequential(nn.Linear(SIZE, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()), 64, classes)


TABLE_PROBLEMS = (
    GauntletProblem("table-clusters", "compatible", partial(table_network, CLASSES), clusters),
    GauntletProblem(
        "table-clusters-near", "partial conflict", partial(table_network, CLASSES, 2), partial(clusters, distance=0.8)
    ),
    GauntletProblem("table-clusters-relabelled", "conflict", partial(table_network, CLASSES), relabelled_clusters),
    GauntletProblem(
        "table-new-classes", "compatible", partial(table_network, 24), partial(clusters, per_task=4, outputs=24)
    ),
    GauntletProblem("table-teachers", "compatible", partial(saturating_network, 4), partial(teachers, shift=4.0)),
    GauntletProblem("table-teachers-near", "partial conflict", partial(deep_table_network, 4), teachers),
    GauntletProblem("table-new-heads", "compatible", partial(table_network, 4, 2, TASKS), partial(teachers, shift=1.0)),
)
