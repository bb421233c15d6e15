"""Deterministic computation: the same bits every time, or an error."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mooring.errors import MooringError

__all__ = ["configure_cublas", "deterministic"]

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""The environment variable for cuBLAS's workspace size; CUDA reads it once, when it starts."""

DETERMINISTIC_WORKSPACES = (":4096:8", ":16:8")
"""The workspace sizes with which cuBLAS is deterministic."""

NOT_DETERMINISTIC = " does not have a deterministic implementation"
"""What PyTorch says after the name of an operation that has no deterministic implementation."""


def configure_cublas(device: str) -> None:
    """Set the environment variable that makes cuBLAS deterministic; must be called before CUDA starts.

    Args:
        device: the device to compute on; nothing is set for a CPU.

    Example:
        >>> configure_cublas("cpu")
    """
    workspace = os.environ.get(WORKSPACE)
    if torch.device(device).type != "cuda" or workspace in DETERMINISTIC_WORKSPACES:
        return
    allowed = " or ".join(DETERMINISTIC_WORKSPACES)
    if workspace is not None:
        raise MooringError(f"{WORKSPACE}={workspace} is not deterministic: give {allowed}, or leave it out")
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise MooringError(f"CUDA has started in this process: set {WORKSPACE} to {allowed} before it does")
    os.environ[WORKSPACE] = DETERMINISTIC_WORKSPACES[0]


@contextmanager
def deterministic(enabled: bool = True) -> Iterator[None]:
    """Make PyTorch deterministic inside the context; an operation that cannot be deterministic raises an error.

    Args:
        enabled: False changes nothing.

    Example:
        >>> with deterministic():
        ...     torch.are_deterministic_algorithms_enabled()
        True
    """
    if not enabled:
        yield
        return
    cudnn = torch.backends.cudnn
    previous = torch.get_deterministic_debug_mode(), cudnn.deterministic, cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    cudnn.deterministic, cudnn.benchmark = True, False
    try:
        yield
    except RuntimeError as error:
        operation, separator, _ = str(error).partition(NOT_DETERMINISTIC)
        if not separator:
            raise
        raise MooringError(
            f"{operation.split()[-1]} is not deterministic: leave --deterministic out, or train another network"
        ) from error
    finally:
        torch.set_deterministic_debug_mode(previous[0])
        cudnn.deterministic, cudnn.benchmark = previous[1:]
