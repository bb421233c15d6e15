"""Launch kernels, or compile many of them in parallel in a dry run before the first one is needed."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_in_dry_run: ContextVar[bool] = ContextVar("in_dry_run", default=False)


def launch(kernel: Any, grid: tuple[int, ...], *args: object, **options: object) -> None:
    """Run a kernel; in a dry run, only compile it."""
    if in_dry_run():
        kernel.warmup(*args, grid=grid, **options)
    else:
        kernel[grid](*args, **options)


def in_dry_run() -> bool:
    """Return whether kernels are only compiled now."""
    return _in_dry_run.get()


class DryRunContext:
    """A stand-in for the context of an autograd function in a dry run; says which inputs need a gradient."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad

    def save_for_backward(self, *saved: Any) -> None:
        """Keep tensors for the backward pass."""
        self.saved_tensors = saved


@contextmanager
def dry_run(*, ignore_errors: bool = False) -> Iterator[None]:
    """Compute nothing inside this context; compile what would be launched, on all cores, ready at the end.

    With ignore_errors=True, kernels that cannot be compiled are ignored; launching them raises the error.
    """
    import triton  # slow to import, and optional

    token = _in_dry_run.set(True)
    try:
        with ThreadPoolExecutor(os.cpu_count()) as pool, triton.AsyncCompileMode(pool, ignore_errors=ignore_errors):
            yield
    finally:
        _in_dry_run.reset(token)
