"""What a reproduction costs: how many models, and how many iterations of one."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mooring.lab.streams.digits import digits
from mooring.lab.streams.options import StreamOptions
from mooring.paper.context.scale import Case, Scale
from mooring.paper.targets import TARGETS, Target

__all__ = ["Cost", "cost"]


@dataclass(frozen=True)
class Cost:
    """Of a target.

    Attributes:
        models: how many are trained at most.
        steps: iterations of one model, all of them together, about; a change of the batch is not looked at.
    """

    models: int
    steps: int


def cost(targets: Sequence[Target], scale: Scale) -> dict[str, Cost]:
    """What targets cost, those that they read included, before any data is read.

    Example:
        >>> from mooring.paper.context.scale import MINIATURE
        >>> from mooring.paper.targets import chosen
        >>> {name: each.models for name, each in cost(chosen(["table1"]), MINIATURE).items()}
        {'grids': 112, 'table1': 116}
    """
    every = dict.fromkeys(name for target in targets for name in (*target.needs, target.name))
    return {name: _cost(TARGETS[name], scale) for name in every}


def _cost(target: Target, scale: Scale) -> Cost:
    """Every case of a target has as many models as the others."""
    models, cases = target.count(scale), target.cases(scale)
    each = sum(_steps(scale, case, search=target.search) for case in cases) / len(cases)
    return Cost(models, round(models * each))


def _steps(scale: Scale, case: Case, *, search: bool) -> int:
    """Iterations of one model through the searched tasks, or through the others."""
    images, tasks = _size(scale.streams[case.data])
    through = scale.search_tasks if search else tasks - scale.search_tasks
    return max(0, through) * math.ceil(images / case.regime.batch) * case.regime.epochs


def _size(options: StreamOptions) -> tuple[int, int]:
    """Training images in a task, and tasks: as the data set is known to be, whatever the folder holds.

    Example:
        >>> _size(StreamOptions("cifar100")), _size(StreamOptions("digits", limit=60))
        ((5000, 10), (60, 5))
    """
    named = options.dataset
    images, classes = (named.train, named.classes) if named else (len(digits().train), 10)
    tasks = classes // options.classes_per_task
    return min(options.limit or images, images // tasks), tasks
