"""Eigenvalues and eigenvectors of many small symmetric matrices in one kernel, without a wait of the host.

PyTorch's own solver asks the GPU whether it succeeded, so that the host waits for everything launched before. Here each
program turns one matrix into a diagonal one by Jacobi rotations: in every round disjoint pairs of rows and columns, all
at once, and in every sweep each pair once (Golub and Van Loan, Matrix Computations, section 8.5).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mooring.backends.kernels.launch import launch

MAX_SWEEPS = 12
"""More than a matrix of float64 needs; a program stops where nothing is left off the diagonal."""


@triton.jit
def _rotate(m, v, step, N: tl.constexpr, R: tl.constexpr):
    """Rotate the pairs of one round of a tournament of N players: the last meets `step`, i meets 2 step - i."""
    i, j = tl.arange(0, R)[:, None], tl.arange(0, R)[None, :]
    column = tl.arange(0, R)
    partner = (2 * step - column + 2 * (N - 1)) % (N - 1)
    partner = tl.where(column == N - 1, step, tl.where(column == step, N - 1, partner))
    partner = tl.where(column < N, partner, column)
    own = tl.sum(tl.where(i == j, m, 0.0), 0)
    off_diagonal = tl.sum(tl.where((i == partner[None, :]) & (i != j), m, 0.0), 0)
    lower, upper = tl.minimum(column, partner), tl.maximum(column, partner)
    off_diagonal = tl.gather(
        off_diagonal, lower, 0
    )  # rounding may make m asymmetric, and both columns need the same rotation
    ratio = (tl.gather(own, upper, 0) - tl.gather(own, lower, 0)) / tl.where(off_diagonal == 0, 1.0, 2 * off_diagonal)
    tangent = tl.where(ratio < 0, -1.0, 1.0) / (tl.abs(ratio) + tl.sqrt(1 + ratio * ratio))
    tangent = tl.where(off_diagonal == 0, 0.0, tl.where(column == lower, tangent, -tangent))
    cosine = 1 / tl.sqrt(1 + tangent * tangent)
    sine = tangent * cosine
    by_column = tl.broadcast_to(partner[None, :], (R, R))
    by_row = tl.broadcast_to(partner[:, None], (R, R))
    m = m * cosine[None, :] - tl.gather(m, by_column, 1) * sine[None, :]
    m = m * cosine[:, None] - tl.gather(m, by_row, 0) * sine[:, None]
    v = v * cosine[None, :] - tl.gather(v, by_column, 1) * sine[None, :]
    return m, v


@triton.jit
def _jacobi(matrices, values, vectors, rank, N: tl.constexpr, R: tl.constexpr, SWEEPS: tl.constexpr):
    """Compute the eigenvalues and eigenvectors of one matrix of `rank` rows; N is `rank` or one more, and even."""
    program = tl.program_id(0).to(tl.int64)
    i, j = tl.arange(0, R)[:, None], tl.arange(0, R)[None, :]
    offsets, inside = program * rank * rank + i * rank + j, (i < rank) & (j < rank)
    m = tl.load(matrices + offsets, mask=inside, other=0.0)
    v = tl.where(i == j, 1.0, 0.0).to(tl.float64)
    total = tl.sum(tl.sum(m * m, 1), 0)
    sweep = 0
    off_diagonal = tl.sum(tl.sum(tl.where(i == j, 0.0, m * m), 1), 0)
    while (sweep < SWEEPS) & (off_diagonal > 1e-32 * total):
        for step in range(N - 1):
            m, v = _rotate(m, v, step, N, R)
        off_diagonal = tl.sum(tl.sum(tl.where(i == j, 0.0, m * m), 1), 0)
        sweep += 1
    column = tl.arange(0, R)
    tl.store(values + program * rank + column, tl.sum(tl.where(i == j, m, 0.0), 0), mask=column < rank)
    tl.store(vectors + offsets, v, mask=inside)


def small_eigen(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues, in no order, and the eigenvectors of matrices (count, rank, rank) in float64 on a GPU."""
    count, rank = matrices.shape[:2]
    values, vectors = matrices.new_empty(count, rank), torch.empty_like(matrices)
    size = max(2, triton.next_power_of_2(rank))
    warps = 1 if size <= 16 else 4
    args = matrices.contiguous(), values, vectors, rank
    launch(_jacobi, (count,), *args, N=rank + rank % 2, R=size, SWEEPS=MAX_SWEEPS, num_warps=warps)
    return values, vectors
