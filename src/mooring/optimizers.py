"""Checks on the optimizer that a model is moored with."""

import torch
from torch import nn

from mooring.errors import MooringError
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
