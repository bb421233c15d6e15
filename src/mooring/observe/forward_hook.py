"""A forward hook that tells its watch, and is forgotten by copies of the model."""

import weakref
from collections.abc import Callable
from typing import Any, Protocol

from torch import nn
from torch._compile import _disable_dynamo

__all__ = ["ForwardHook", "Observer"]


class Observer(Protocol):
    """Who is told."""

    def after_forward(self, module: nn.Module, args: Any, returned: Any) -> None:
        """A module has run on these arguments, and returned that."""


class ForwardHook:
    """The hook itself: a copy of the model, or one that was saved, is not watched.

    Args:
        watch: who is told, for as long as it is there; None for nobody.
    """

    def __init__(self, watch: Observer | None = None) -> None:
        self.watch: Callable[[], Observer | None] = (lambda: None) if watch is None else weakref.ref(watch)

    @_disable_dynamo  # torch.compiler.disable, without importing the compiler now
    def __call__(self, module: nn.Module, args: Any, returned: Any) -> None:
        """Tell the watch, if it is still there."""
        watch = self.watch()
        if watch is not None:
            watch.after_forward(module, args, returned)

    def __deepcopy__(self, memo: Any) -> "ForwardHook":
        return ForwardHook()

    def __reduce__(self) -> tuple[type["ForwardHook"], tuple[()]]:
        return ForwardHook, ()
