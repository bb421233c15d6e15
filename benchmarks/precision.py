"""The precision in which a benchmark trains, for all of its methods alike."""

from contextlib import AbstractContextManager, nullcontext

import torch

PRECISIONS = ["float32", "tf32", "bf16"]
"""Evaluation has no autocast in any of them; it computes in TF32 with the last two."""


def set_precision(precision: str) -> None:
    """Let matrix products and convolutions of float32 compute in TF32, unless "float32" is asked for."""
    torch.set_float32_matmul_precision("highest" if precision == "float32" else "high")
    torch.backends.cudnn.allow_tf32 = precision != "float32"


def autocast(precision: str, device: str) -> AbstractContextManager[object]:
    """Return the context in which training computes its loss."""
    if precision != "bf16":
        return nullcontext()
    return torch.autocast(device.partition(":")[0], dtype=torch.bfloat16)
