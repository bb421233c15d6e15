"""Optimizers that evaluate a closure within their step, or whose step calls that of their parent."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from mooring.errors import MooringError


def with_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], wrapped: Callable[[Callable[[], Any]], Callable[[], Any]]
) -> tuple[Any, dict[str, Any]] | None:
    """Return the arguments of an optimizer's step with its closure wrapped; None if it has none.

    Example:
        >>> with_closure(("optimizer", max), {}, lambda closure: min)
        (('optimizer', <built-in function min>), {})
    """
    if len(args) > 1 and args[1] is not None:
        return (args[0], wrapped(args[1]), *args[2:]), kwargs
    if kwargs.get("closure") is not None:
        return args, {**kwargs, "closure": wrapped(kwargs["closure"])}
    return None


def single_use(closure: Callable[[], Any], after_loss: Callable[[Any], None]) -> Callable[[], Any]:
    """Return the closure followed by a function of its loss; it refuses a second evaluation."""
    evaluated = False

    def wrapper() -> Any:
        nonlocal evaluated
        if evaluated:
            raise MooringError("the optimizer evaluates its closure several times in a step and cannot be moored")
        evaluated = True
        loss = closure()
        after_loss(loss)
        return loss

    return wrapper


def calls_its_parent(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a step of this optimizer is under way above the one whose pre-hook calls this function."""
    hook_caller = sys._getframe(2)
    frame: FrameType | None = hook_caller.f_back
    while frame is not None:
        if frame.f_code is hook_caller.f_code and frame.f_locals.get("self") is optimizer:
            return True
        frame = frame.f_back
    return False
