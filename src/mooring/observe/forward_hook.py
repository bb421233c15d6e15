"""A forward hook that notifies an observer and is dropped from copies of the model."""

import weakref
from collections.abc import Callable
from typing import Any, Protocol

from torch import nn
from torch._compile import _disable_dynamo

__all__ = ["ForwardHook", "Observer"]


class Observer(Protocol):
    """An object that is notified after each forward pass of a module."""

    def after_forward(self, module: nn.Module, args: Any, returned: Any) -> None:
        """Handle one forward pass: the module, its positional arguments and its result."""


class ForwardHook:
    """A forward hook with a weak reference to its observer.

    A copied or unpickled model has the hook without an observer, so it is not observed.

    Args:
        observer: the object to notify while it exists; None for no observer.
    """

    def __init__(self, observer: Observer | None = None) -> None:
        self.observer: Callable[[], Observer | None] = (lambda: None) if observer is None else weakref.ref(observer)

    @_disable_dynamo  # torch.compiler.disable, without importing the compiler now
    def __call__(self, module: nn.Module, args: Any, returned: Any) -> None:
        """Notify the observer if it still exists."""
        observer = self.observer()
        if observer is not None:
            observer.after_forward(module, args, returned)

    def __deepcopy__(self, memo: Any) -> "ForwardHook":
        return ForwardHook()

    def __reduce__(self) -> tuple[type["ForwardHook"], tuple[()]]:
        return ForwardHook, ()
