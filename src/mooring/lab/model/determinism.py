"""The same bits every time: what is given up for it, and what is refused."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mooring.errors import MooringError

__all__ = ["configure_cublas", "deterministic"]

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""How much memory matrix products may use: CUDA reads it once, when it starts."""

FIXED = (":4096:8", ":16:8")
"""The values with which a product is computed in one way only."""

NO_WAY = " does not have a deterministic implementation"
"""How PyTorch says that an operation cannot do it."""


def configure_cublas(device: str) -> None:
    """Settle what CUDA reads when it starts; refused where it has started otherwise.

    Args:
        device: where to compute; on a CPU there is nothing to settle.

    Example:
        >>> configure_cublas("cpu")
    """
    told = os.environ.get(WORKSPACE)
    if torch.device(device).type != "cuda" or told in FIXED:
        return
    allowed = " or ".join(FIXED)
    if told is not None:
        raise MooringError(f"{WORKSPACE}={told} is not deterministic: give {allowed}, or leave it out")
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise MooringError(f"CUDA has started in this process: set {WORKSPACE} to {allowed} before it does")
    os.environ[WORKSPACE] = FIXED[0]


@contextmanager
def deterministic(on: bool = True) -> Iterator[None]:
    """While this lasts, every operation gives the same bits for the same input; one that cannot is refused.

    Args:
        on: whether it is asked for.

    Example:
        >>> with deterministic():
        ...     torch.are_deterministic_algorithms_enabled()
        True
    """
    if not on:
        yield
        return
    cudnn = torch.backends.cudnn
    before = torch.get_deterministic_debug_mode(), cudnn.deterministic, cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    cudnn.deterministic, cudnn.benchmark = True, False
    try:
        yield
    except RuntimeError as error:
        operation, found, _ = str(error).partition(NO_WAY)
        if not found:
            raise
        raise MooringError(
            f"{operation.split()[-1]} gives other bits each time: leave --deterministic out, or train another network"
        ) from error
    finally:
        torch.set_deterministic_debug_mode(before[0])
        cudnn.deterministic, cudnn.benchmark = before[1:]
