"""The Moorings of this process, so that one can ask which others train parameters of the same model."""

import gc
from collections.abc import Collection
from weakref import WeakSet

from torch import Tensor

from mooring.errors import UnheldWarning, warn
from mooring.observe.layer_observer import LayerObserver
from mooring.observe.output_observer import OutputObserver
from mooring.step import TrainingStep

ATTACHED: WeakSet[TrainingStep] = WeakSet()
"""The steps whose hooks are on an optimizer."""


def siblings(step: TrainingStep) -> list[TrainingStep]:
    """Return the steps of other Moorings whose optimizers train parameters of the same model."""
    others = [other for other in ATTACHED if other is not step]
    return [other for other in others if any(p in step.states.names for p in other.states.optimizer_parameters())]


def parameters_of_siblings(step: TrainingStep) -> Collection[Tensor]:
    """Return the parameters that other Moorings train."""
    return {p for other in siblings(step) for p in other.states.optimizer_parameters()}


def observers_of_siblings(step: TrainingStep) -> list[OutputObserver | LayerObserver]:
    """Return the observers of other Moorings, which see every pass of the model too."""
    observers = [observer for other in siblings(step) for observer in (other.outputs, other.layers)]
    return [observer for observer in observers if observer]


def warn_of_other_budgets(step: TrainingStep) -> None:
    """Warn if another Mooring of the same model has a budget too: each keeps its own, and forgetting adds up."""
    if step.budget is None or not any(other.budget for other in siblings(step)):
        return
    gc.collect()  # an optimizer without references is no sibling
    if others := [other.budget.budget.nats for other in siblings(step) if other.budget]:
        total = float(step.budget.budget.nats) + sum(map(float, others))
        warn(
            f"{len(others) + 1} Moorings of this model have a budget each, so together they may forget {total:g} nats: "
            "divide what may be forgotten between them, or detach() the one that is not used anymore",
            UnheldWarning,
        )
