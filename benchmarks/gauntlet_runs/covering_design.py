"""The cells of the gauntlet: a covering design of pairs over problems and the ways to train on them."""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, product
from typing import Any

from gauntlet_problems.problem_set import PROBLEMS, problems_of

from gauntlet_runs.extra_optimizers import OPTIMIZERS
from gauntlet_runs.schedules import SCHEDULES

CELLS = 120
"""The number of cells of a half."""

FACTORS: dict[str, Sequence[Any]] = {
    "optimizer": list(OPTIMIZERS),
    "schedule": list(SCHEDULES),
    "length": [100, 300, 1000],
    "clipped": [False, True],
    "summed": [False, True],
    "adapters": [False, True],
    "tasks": [1, 5],
    "reference": [64, 1024],
    "known": [False, True],
}
"""The levels of every factor but the problem, which is the first factor of a half."""

Level = tuple[str, Any]
"""A factor and its level."""


@dataclass(frozen=True)
class GauntletCell:
    """A problem and a way to train on it.

    Attributes:
        problem: the name of the problem.
        optimizer: the name of the optimizer.
        schedule: the name of the schedule of the learning rate.
        length: the number of steps of a task.
        clipped: whether the norm of the gradient is clipped at 1.
        summed: whether the loss is the sum over the batch instead of the mean.
        adapters: whether low-rank adapters train instead of all parameters.
        tasks: the number of new tasks.
        reference: the number of old inputs.
        known: whether the model was trained on these old inputs.
    """

    problem: str
    optimizer: str
    schedule: str
    length: int
    clipped: bool
    summed: bool
    adapters: bool
    tasks: int
    reference: int
    known: bool

    @property
    def text(self) -> str:
        """Return what tells a cell from all others."""
        flags = (name for name in ("clipped", "summed", "adapters", "known") if getattr(self, name))
        parts = (self.optimizer, self.schedule, self.length, f"{self.tasks}t", self.reference, *flags)
        return " ".join(map(str, (self.problem, *parts))).replace(" ", "/")

    def levels(self) -> list[Level]:
        """Return every factor and its level."""
        return list(asdict(self).items())


def possible(levels: dict[str, Any]) -> bool:
    """Return whether levels can be combined; factors may be missing.

    Example:
        >>> possible({"tasks": 5, "length": 1000}), possible({"tasks": 5, "length": 300})
        (False, True)
    """
    problem = PROBLEMS.get(levels.get("problem", ""))
    if levels.get("tasks") == 5 and (levels.get("length") == 1000 or (problem and problem.tasks < 5)):
        return False
    return not (levels.get("adapters") and problem and not problem.adaptable)


def pairs_to_cover(problems: Sequence[str]) -> Iterator[tuple[Level, Level]]:
    """Yield every pair of levels of two factors that can be combined."""
    for (first, levels), (second, others) in combinations({"problem": problems, **FACTORS}.items(), 2):
        for a, b in product(levels, others):
            if possible({first: a, second: b}):
                yield (first, a), (second, b)


def design(half: str, seed: int = 0) -> list[GauntletCell]:
    """Return the cells of a half, in an order in which pairs are covered as early as possible.

    Every problem has every optimizer; each of the other levels is the one that covers the most pairs that are still
    uncovered, and among these the one that is rarest so far, where a long task counts three times.
    """
    problems = [problem.name for problem in problems_of(half)]
    chooser = random.Random(seed)
    uncovered = set(pairs_to_cover(problems))
    grid = list(product(problems, FACTORS["optimizer"]))
    chooser.shuffle(grid)
    grid += chooser.sample(grid, CELLS - len(grid))
    grid = _spread(grid)
    uses: dict[Level, float] = {}
    cells = []
    for problem, optimizer in grid:
        levels: dict[str, Any] = {"problem": problem, "optimizer": optimizer}
        names = [name for name in FACTORS if name != "optimizer"]
        chooser.shuffle(names)
        for name in names:
            allowed = [level for level in FACTORS[name] if possible({**levels, name: level})]
            levels[name] = max(allowed, key=lambda level: _worth((name, level), levels, uncovered, uses, chooser))
        cell = GauntletCell(**levels)
        cells.append(cell)
        uncovered -= {pair for a, b in combinations(cell.levels(), 2) for pair in ((a, b), (b, a))}
        for level in cell.levels():
            uses[level] = uses.get(level, 0.0) + (3.0 if level == ("length", 1000) else 1.0)
    return cells


def _worth(
    level: Level, levels: dict[str, Any], uncovered: set[tuple[Level, Level]], uses: dict[Level, float], chooser: Any
) -> tuple[int, float, float]:
    """Return the number of new pairs that a level covers, then how rare it is."""
    pairs = ((level, other) for other in levels.items())
    new = sum((a, b) in uncovered or (b, a) in uncovered for a, b in pairs)
    return new, -uses.get(level, 0.0), chooser.random()


def _spread(grid: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the same in an order in which problems and optimizers come in turn, so that a part has all of them."""
    left, ordered = list(grid), list[tuple[str, str]]()
    problems, optimizers = (len(set(names)) for names in zip(*grid, strict=True))
    counts = Counter[str]()
    while left:
        best = min(left, key=lambda pair: counts[pair[0]] + counts[pair[1]] * problems / optimizers)
        left.remove(best)
        ordered.append(best)
        counts.update(best)
    return ordered
