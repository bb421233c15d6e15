"""Block-diagonal factors, for layers whose whole factors would be too wide: blocks of equal size along the diagonal."""

import torch
from torch import Tensor


def block_size(size: int, largest: int | None) -> int:
    """Return the size of equal blocks of a factor: the largest divisor of its size that is at most `largest`.

    Example:
        >>> block_size(5632, 512), block_size(768, None), block_size(50257, 512)
        (512, 768, 29)
    """
    if largest is None or size <= largest:
        return size
    return next(divisor for divisor in range(largest, 0, -1) if size % divisor == 0)


def split_rows(rows: Tensor, size: int) -> Tensor:
    """Return rows (n, features) as (blocks, n, size).

    Example:
        >>> split_rows(torch.zeros(5, 6), 2).shape
        torch.Size([3, 5, 2])
    """
    return rows.reshape(len(rows), -1, size).transpose(0, 1)


def rotate(left: Tensor, d: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """Return L d R of block-diagonal matrices L and R, given by their blocks.

    Args:
        left: the blocks of L, (..., p, bo, bo).
        d: a matrix, (..., p * bo, q * bi).
        right: the blocks of R, (..., q, bi, bi).
        out: a contiguous tensor of the shape of d for the result, which saves a copy.

    Example:
        >>> left, right = torch.tensor([[[2.0]], [[3.0]]]), torch.eye(2).unsqueeze(0)
        >>> rotate(left, torch.ones(2, 2), right)
        tensor([[2., 2.],
                [3., 3.]])
    """
    lead, blocks, size = d.shape[:-2], right.shape[-3], right.shape[-1]
    x = (left @ d.reshape(*lead, left.shape[-3], left.shape[-1], d.shape[-1])).reshape(d.shape)
    if blocks == 1:
        return torch.matmul(x, right.squeeze(-3), out=out)
    columns = x.reshape(*x.shape[:-1], blocks, size).transpose(-3, -2) @ right
    if out is None:
        return columns.transpose(-3, -2).reshape(d.shape)
    out.view(*x.shape[:-1], blocks, size).copy_(columns.transpose(-3, -2))
    return out
