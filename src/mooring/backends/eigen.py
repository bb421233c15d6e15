"""Eigenvalues and eigenvectors of small symmetric matrices, without a wait for a GPU where a kernel can do them."""

import torch
from torch import Tensor

from mooring.backends.eager import has_compiler

MAX_RANK = 32
"""The largest matrices that one program of the kernel holds in its registers."""


def eigen(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues, in any order, and the eigenvectors of float64 matrices (..., rank, rank).

    Example:
        >>> values, vectors = eigen(torch.eye(2, dtype=torch.float64))
        >>> values
        tensor([1., 1.], dtype=torch.float64)
    """
    if 0 < matrices.shape[-1] <= MAX_RANK and has_compiler(matrices.device):
        from mooring.backends.kernels.jacobi import small_eigen

        values, vectors = small_eigen(matrices.flatten(0, -3))
        return values.reshape(matrices.shape[:-1]), vectors.reshape(matrices.shape)
    values, vectors = torch.linalg.eigh(matrices)
    return values, vectors
