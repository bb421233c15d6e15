"""The dtypes that runs compute with."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mooring.errors import MooringError

__all__ = ["check_precision", "parameter_dtype", "product_dtype", "tf32_mode"]


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
