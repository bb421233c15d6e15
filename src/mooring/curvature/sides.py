"""The factor of one side of a layer, its inputs or its outputs: a matrix, blocks along its diagonal, or its diagonal.

A factor F of n features is a matrix (n, n); of a wider side (blocks, size, size), with zeros behind the last feature;
of one that is wider still (n,), its diagonal. Features of one block are known together, those of two blocks as if they
had nothing to do with each other. Every function takes leading axes, such as one of several layers.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from mooring.curvature.kronecker_factors import float32_product, sums_in_float32

MAX_BLOCKS = 8
"""A side that would need more blocks has its diagonal only, such as the vocabulary of a language model."""


def side_shape(size: int, largest: int) -> tuple[int, ...]:
    """Return the shape of the factor of a side.

    Args:
        size: the number of features.
        largest: the most that a matrix, or a block, has.

    Example:
        >>> side_shape(8, largest=8), side_shape(20, largest=8), side_shape(100, largest=8)
        ((8, 8), (3, 7, 7), (100,))
    """
    blocks = -(-size // largest)
    if blocks > MAX_BLOCKS:
        return (size,)
    return (size, size) if blocks <= 1 else (blocks, -(-size // blocks), -(-size // blocks))


def second_moment(rows: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the sum of x x' over rows x, (m, n), as a factor of a shape, in float32 or wider.

    Example:
        >>> second_moment(torch.ones(3, 4), (2, 2, 2)).tolist()
        [[[3.0, 3.0], [3.0, 3.0]], [[3.0, 3.0], [3.0, 3.0]]]
    """
    wide = torch.promote_types(rows.dtype, torch.float32)
    if len(shape) == 1:
        return rows.to(wide).square().sum(0)
    parts = _split(rows, shape[0], shape[1]) if len(shape) == 3 else rows
    if not sums_in_float32(parts):
        parts = parts.to(wide)
    return float32_product(parts.mT, parts)


def rows_times(rows: Tensor, factor: Tensor, size: int | None = None) -> Tensor:
    """Return rows @ F.

    Args:
        rows: (..., m, n).
        factor: F; which form it has follows from its number of axes.
        size: the number of columns to return; by default those of the blocks together.

    Example:
        >>> rows, blocks = torch.ones(1, 3), torch.ones(2, 2, 2)
        >>> rows_times(rows, torch.tensor([1.0, 2.0, 3.0])), rows_times(rows, torch.eye(3)), rows_times(rows, blocks)
        (tensor([[1., 2., 3.]]), tensor([[1., 1., 1.]]), tensor([[2., 2., 1., 1.]]))
    """
    if factor.ndim < rows.ndim:
        return rows * factor.unsqueeze(-2)
    if factor.ndim == rows.ndim:
        return rows @ factor
    parts = _split(rows, factor.shape[-3], factor.shape[-1]) @ factor
    return parts.movedim(-3, -2).flatten(-2)[..., :size]


def side_diagonal(factor: Tensor, size: int) -> Tensor:
    """Return the diagonal of one factor, (size,).

    Example:
        >>> side_diagonal(torch.ones(2, 2, 2), 3)
        tensor([1., 1., 1.])
    """
    return factor if factor.ndim == 1 else factor.diagonal(dim1=-2, dim2=-1).flatten()[:size]


def _split(rows: Tensor, blocks: int, size: int) -> Tensor:
    """Return rows (..., m, n) as (..., blocks, m, size), with zeros behind the last column."""
    missing = blocks * size - rows.shape[-1]
    whole = pad(rows, (0, missing)) if missing else rows
    return whole.reshape(*whole.shape[:-1], blocks, size).movedim(-2, -3)
