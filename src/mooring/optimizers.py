"""Which optimizers can be moored, and which one takes the steps."""

import torch
from torch import nn

from mooring.errors import MooringError
from mooring.state.selection import moorable
from mooring.step import TrainingStep

__all__ = ["check_optimizer", "stepping"]


def stepping(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that takes the steps: a wrapper without hooks of its own, such as Accelerate's, hands them on."""
    while not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, torch.optim.Optimizer):
            raise MooringError(f"{type(optimizer).__name__} has no hooks: give the optimizer that it wraps")
        optimizer = inner
    return optimizer


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, exclude: tuple[str, ...]) -> None:
    """Refuse what cannot be moored, before anything is touched."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise MooringError(
            "LBFGS evaluates its closure several times in a step and cannot be moored: use another optimizer"
        )
    if any(
        isinstance(getattr(h, "__self__", None), TrainingStep) for h in optimizer._optimizer_step_pre_hooks.values()
    ):
        raise MooringError(
            "this optimizer is moored already: detach() the first Mooring, or give each optimizer its own"
        )
    held = [p for group in optimizer.param_groups for p in group["params"]]
    everything = moorable(model, ())
    if not any(p in everything for p in held):
        raise MooringError("the optimizer holds none of the model's parameters: build it from model.parameters()")
    names = moorable(model, exclude)
    moored = {names[p]: p for p in held if p in names}
    if not moored:
        raise MooringError("every parameter the optimizer holds is excluded: leave at least one to moor")
    for name, p in moored.items():
        if p.is_complex():
            raise MooringError(f"{name!r} is complex, which cannot be moored: exclude it")
    for path, module in model.named_modules():
        if (
            getattr(module, "sparse", False)
            and isinstance(module, nn.Embedding | nn.EmbeddingBag)
            and module.weight in names
        ):
            raise MooringError(f"{path!r} has sparse gradients, which cannot be moored: use sparse=False or exclude it")
