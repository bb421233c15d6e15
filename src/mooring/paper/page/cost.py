"""The cost of a reproduction: how many models and how many training iterations."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mooring.lab.streams.digits import digits
from mooring.lab.streams.options import StreamOptions
from mooring.paper.context.scale import Condition, Scale
from mooring.paper.targets import TARGETS, Target

__all__ = ["TrainingCost", "training_cost"]


@dataclass(frozen=True)
class TrainingCost:
    """The cost of a target.

    Attributes:
        models: an upper bound on the models that are trained.
        steps: an estimate of the iterations, summed over models; it ignores changes of the batch size.
    """

    models: int
    steps: int


def training_cost(targets: Sequence[Target], scale: Scale) -> dict[str, TrainingCost]:
    """Return the cost of targets and of those whose runs they read, before any data is read.

    Example:
        >>> from mooring.paper.context.scale import MINIATURE
        >>> from mooring.paper.targets import select_targets
        >>> {name: cost.models for name, cost in training_cost(select_targets(["table1"]), MINIATURE).items()}
        {'grids': 112, 'table1': 116}
    """
    names = dict.fromkeys(name for target in targets for name in (*target.needs, target.name))
    return {name: _target_cost(TARGETS[name], scale) for name in names}


def _target_cost(target: Target, scale: Scale) -> TrainingCost:
    models, conditions = target.count(scale), target.conditions(scale)
    # Every condition of a target trains the same number of models.
    mean_steps = sum(_steps(scale, condition, search=target.search) for condition in conditions) / len(conditions)
    return TrainingCost(models, round(models * mean_steps))


def _steps(scale: Scale, condition: Condition, *, search: bool) -> int:
    """Return the iterations of one model on the searched tasks, or on the others."""
    images, tasks = _stream_size(scale.streams[condition.data])
    trained = scale.search_tasks if search else tasks - scale.search_tasks
    return max(0, trained) * math.ceil(images / condition.regime.batch) * condition.regime.epochs


def _stream_size(options: StreamOptions) -> tuple[int, int]:
    """Return training images per task and tasks, from the documented size of the data set.

    Example:
        >>> _stream_size(StreamOptions("cifar100")), _stream_size(StreamOptions("digits", limit=60))
        ((5000, 10), (60, 5))
    """
    dataset = options.dataset
    images, classes = (dataset.train, dataset.classes) if dataset else (len(digits().train), 10)
    tasks = classes // options.classes_per_task
    return min(options.limit or images, images // tasks), tasks
