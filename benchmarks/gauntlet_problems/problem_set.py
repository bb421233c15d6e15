"""All problems of the gauntlet, and their halves: one to choose on, one to report."""

import random

from gauntlet_problems.pictures import PICTURE_PROBLEMS
from gauntlet_problems.problem_definition import GauntletProblem
from gauntlet_problems.sequences import SEQUENCE_PROBLEMS
from gauntlet_problems.tables import TABLE_PROBLEMS
from gauntlet_problems.texts import TEXT_PROBLEMS

PROBLEMS: dict[str, GauntletProblem] = {
    problem.name: problem for problem in (*PICTURE_PROBLEMS, *TABLE_PROBLEMS, *TEXT_PROBLEMS, *SEQUENCE_PROBLEMS)
}

HALVES = ("choice", "reported")
"""Constants are chosen on the first half; the second is run once, at the end."""


SPLIT_SEED = 3
"""The first seed with which both halves have a language model and a tagger."""


def problems_of(half: str, seed: int = SPLIT_SEED) -> list[GauntletProblem]:
    """Return the problems of a half; relations between tasks and kinds are divided evenly by a seeded shuffle.

    Example:
        >>> names = [{problem.name for problem in problems_of(half)} for half in HALVES]
        >>> [len(part) for part in names], names[0] & names[1]
        ([14, 14], set())
    """
    shuffled = sorted(PROBLEMS.values(), key=lambda problem: problem.name)
    random.Random(seed).shuffle(shuffled)
    shuffled.sort(key=lambda problem: (problem.relation, problem.kind))  # stable, so the order within is random
    return shuffled[HALVES.index(half) :: 2]
