"""How kernels are launched; and rehearsed: compiled many at a time, before the first of them is needed."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

__all__ = ["DryRun", "dry_run", "in_dry_run", "launch"]

_in_dry_run: ContextVar[bool] = ContextVar("dry_run", default=False)


def launch(kernel: Any, grid: tuple[int, ...], *told: object, **options: object) -> None:
    """Run a kernel; in a rehearsal, only see to it that it is compiled."""
    if in_dry_run():
        kernel.warmup(*told, grid=grid, **options)
    else:
        kernel[grid](*told, **options)


def in_dry_run() -> bool:
    """Whether nothing is to be computed now."""
    return _in_dry_run.get()


class DryRun:
    """What a function of autograd's is told and keeps for its way back, where nothing is computed.

    Args:
        needs_input_grad: which of its inputs want a gradient.
    """

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad

    def save_for_backward(self, *saved: Any) -> None:
        """As a context does."""
        self.saved_tensors = saved


@contextmanager
def dry_run(*, ignore_errors: bool = False) -> Iterator[None]:
    """While this lasts nothing is computed; what would be launched is compiled, on all cores, and ready at the end.

    Args:
        ignore_errors: leave what cannot be compiled to whoever launches it.
    """
    import triton  # slow, and not everywhere

    token = _in_dry_run.set(True)
    try:
        with ThreadPoolExecutor(os.cpu_count()) as pool, triton.AsyncCompileMode(pool, ignore_errors=ignore_errors):
            yield
    finally:
        _in_dry_run.reset(token)
