"""What numbers a fleet computes with."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mooring.errors import MooringError

__all__ = ["check_precision", "parameter_dtype", "product_dtype", "tf32_mode"]


def parameter_dtype(dtype: str) -> torch.dtype:
    """The dtype of parameters and of everything kept about them.

    Example:
        >>> parameter_dtype("bf16"), parameter_dtype("float64")
        (torch.float32, torch.float64)
    """
    return torch.float64 if dtype == "float64" else torch.float32


def product_dtype(dtype: str) -> torch.dtype | None:
    """The dtype of products where it is not the parameters' own.

    Example:
        >>> product_dtype("bf16"), product_dtype("tf32")
        (torch.bfloat16, None)
    """
    return torch.bfloat16 if dtype == "bf16" else None


def check_precision(dtype: str, device: str) -> None:
    """Refuse on a CPU what only a GPU computes with.

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
    """While this lasts, float32 products are TF32 exactly where that was asked for."""
    matrices, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matrices.allow_tf32, convolutions.allow_tf32
    matrices.allow_tf32 = convolutions.allow_tf32 = dtype == "tf32"
    try:
        yield
    finally:
        matrices.allow_tf32, convolutions.allow_tf32 = before
