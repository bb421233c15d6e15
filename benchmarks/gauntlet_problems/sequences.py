"""Problems of sequences of vectors: waves that differ in frequency, and in which order two patterns come."""

from functools import partial

import torch
from torch import Generator

from gauntlet_problems.problem_definition import (
    Examples,
    GauntletProblem,
    Part,
    World,
    angles,
    other_labels,
    random_directions,
)
from gauntlet_problems.small_networks import WIDTH, GatedRecurrence, HeadedNetwork, TinyTransformer

TIME, SIZE, CLASSES, TASKS = 12, 3, 6, 6


def waves(structure: Generator, conflict: bool = False) -> World:
    """Waves of six frequencies; a new task has other directions and shapes, or other labels of three of them."""
    directions = random_directions(TASKS, SIZE, structure)
    times = torch.arange(float(TIME))

    def world(task: int, part: Part, count: int, generator: Generator) -> Examples:
        labels = torch.randint(CLASSES, (count,), generator=generator)
        phase = (0.3 + 0.4 * labels)[:, None] * times + angles(count, generator)[:, None]
        wave = phase.sin() if conflict or task % 2 == 0 else phase.sin().sign()
        signal = wave[..., None] * directions[0 if conflict else task] * 1.5
        x = signal + 0.4 * torch.randn(count, TIME, SIZE, generator=generator)
        return x, other_labels(CLASSES, task % 3, among=3)[labels] if conflict and task else labels

    return world


def orders(structure: Generator, new_heads: bool = False) -> World:
    """Three patterns in a row, whose order is the class; a new task has other patterns.

    With new heads, a new task is which pattern comes twice, of the same patterns.
    """
    patterns = 1.5 * torch.randn(TASKS, 3, SIZE, generator=structure)
    permutations = torch.tensor([[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]])

    def world(task: int, part: Part, count: int, generator: Generator) -> Examples:
        labels = torch.randint(CLASSES, (count,), generator=generator)
        places = permutations[labels].repeat_interleave(TIME // 3, 1)
        if new_heads and task:
            twice = permutations[labels].clone()
            twice[torch.arange(count), torch.randint(2, (count,), generator=generator)] = twice[:, 2]
            places, labels = twice.repeat_interleave(TIME // 3, 1), (twice[:, 2] + task) % 3
        chosen = patterns[0 if new_heads else task][places]
        return chosen + 0.7 * torch.randn(count, TIME, SIZE, generator=generator), labels

    return world


def recurrent() -> HeadedNetwork:
    """Return a GRU."""
    return HeadedNetwork(GatedRecurrence(SIZE), WIDTH, CLASSES)


def transformer(heads: int = 1) -> HeadedNetwork:
    """Return a transformer over vectors."""
    return HeadedNetwork(TinyTransformer(None, TIME, size=SIZE, pooled=True), WIDTH, CLASSES, heads)


SEQUENCE_PROBLEMS = (
    GauntletProblem("sequence-waves", "compatible", recurrent, waves, adaptable=False),
    GauntletProblem(
        "sequence-waves-relabelled", "partial conflict", recurrent, partial(waves, conflict=True), 2, adaptable=False
    ),
    GauntletProblem("sequence-orders", "compatible", transformer, orders),
    GauntletProblem("sequence-new-heads", "compatible", partial(transformer, TASKS), partial(orders, new_heads=True)),
)
