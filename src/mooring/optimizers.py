"""The optimizers that are moored: checks on a new one, and which others train parameters of the same model."""

import gc
from collections.abc import Collection
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from mooring.errors import MooringError, UnheldWarning, warn
from mooring.observe.layer_observer import LayerObserver
from mooring.observe.output_observer import OutputObserver
from mooring.state.selection import moorable
from mooring.step import TrainingStep


def unwrap_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer inside wrappers that have no hooks of their own, such as Accelerate's."""
    while not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, torch.optim.Optimizer):
            raise MooringError(f"{type(optimizer).__name__} has no step hooks: give attach the optimizer that it wraps")
        optimizer = inner
    return optimizer


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, exclude: tuple[str, ...]) -> None:
    """Refuse optimizers and parameters that cannot be moored."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise MooringError(
            "LBFGS cannot be moored, because it evaluates its closure several times in a step: use another optimizer"
        )
    hooks = optimizer._optimizer_step_pre_hooks.values()
    if any(isinstance(getattr(hook, "__self__", None), TrainingStep) for hook in hooks):
        raise MooringError(
            "this optimizer already has a Mooring: detach() that one first, or give each Mooring its own optimizer"
        )
    held = [p for group in optimizer.param_groups for p in group["params"]]
    all_parameters = moorable(model, ())
    if lazy := [name for p, name in all_parameters.items() if is_lazy(p)]:
        raise MooringError(f"{lazy[0]!r} has no shape yet: call the model once, then make the optimizer and attach")
    if not any(p in all_parameters for p in held):
        raise MooringError("the optimizer holds none of the model's parameters: build it from model.parameters()")
    names = moorable(model, exclude)
    moored = {names[p]: p for p in held if p in names}
    if not moored:
        raise MooringError("every parameter of the optimizer is excluded: leave at least one to moor")
    for name, p in moored.items():
        if p.is_complex():
            raise MooringError(f"{name!r} is complex and cannot be moored: exclude it")
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight in names:
            raise MooringError(f"{path!r} has sparse gradients and cannot be moored: use sparse=False or exclude it")


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
