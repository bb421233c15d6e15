"""The arithmetic of runs: their dtypes, and determinism, which gives the same bits every time or an error."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mooring.errors import MooringError

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""The environment variable for cuBLAS's workspace size; CUDA reads it once, when it starts."""

DETERMINISTIC_WORKSPACES = (":4096:8", ":16:8")
"""The workspace sizes with which cuBLAS is deterministic."""

NOT_DETERMINISTIC = " does not have a deterministic implementation"
"""What PyTorch says after the name of an operation that has no deterministic implementation."""


def parameter_dtype(dtype: str) -> torch.dtype:
    """Return the dtype of the parameters and of all state that is kept for them.

    Example:
        >>> parameter_dtype("bf16"), parameter_dtype("float64")
        (torch.float32, torch.float64)
    """
    return torch.float64 if dtype == "float64" else torch.float32


def product_dtype(dtype: str) -> torch.dtype | None:
    """Return the dtype of matrix products and convolutions; None if it is the dtype of the parameters.

    Example:
        >>> product_dtype("bf16"), product_dtype("tf32")
        (torch.bfloat16, None)
    """
    return torch.bfloat16 if dtype == "bf16" else None


def check_precision(dtype: str, device: str) -> None:
    """Raise an error for a GPU's dtype on a CPU.

    Example:
        >>> check_precision("tf32", "cpu")
        Traceback (most recent call last):
        ...
        mooring.errors.MooringError: dtype='tf32' is for a GPU: give float32 or float64, or --device cuda
    """
    if dtype in ("tf32", "bf16") and not device.startswith("cuda"):
        raise MooringError(f"dtype={dtype!r} is for a GPU: give float32 or float64, or --device cuda")


@contextmanager
def tf32_mode(dtype: str) -> Iterator[None]:
    """Compute float32 products in TF32 inside the context if the dtype is "tf32", and in full float32 if not."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    previous = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = dtype == "tf32"
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = previous


def configure_cublas(device: str) -> None:
    """Set the environment variable that makes cuBLAS deterministic, unless the device is a CPU, before CUDA starts.

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
    """Make PyTorch deterministic inside the context, if enabled; an operation that cannot be raises an error.

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
        name = operation.split()[-1]
        raise MooringError(
            f"{name} is not deterministic: leave --deterministic out, or train another network"
        ) from error
    finally:
        torch.set_deterministic_debug_mode(previous[0])
        cudnn.deterministic, cudnn.benchmark = previous[1:]
