"""Eigenvalues and eigenvectors of factors, which are symmetric matrices, several at once on a GPU."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

ITERATED_SIZES = range(33, 513)
"""The sizes of float32 matrices that torch decomposes on a GPU by Jacobi's iteration: 23 ms for one of 512.

Others, and float64 ones of any size, are reduced to tridiagonal ones: 8 ms for one of 768.
"""

SOLVERS_AT_ONCE = 4
"""Matrices that a GPU decomposes at once. A solver launches small kernels, which leave most of it idle."""


def eigenbases(matrices: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return `eigenbasis` of each matrix, which does not depend on the others.

    A matrix that equals the one of its shape before it, as the A of layers with the same input, is not decomposed
    again. Those on a GPU are decomposed by several threads, each with a stream of its own: a solver waits to see
    whether it succeeded, so that one thread could not start the next one meanwhile.

    Example:
        >>> [values.tolist() for values, _ in eigenbases([torch.eye(2), torch.eye(2), 2 * torch.eye(2)])]
        [[1.0, 1.0], [1.0, 1.0], [2.0, 2.0]]
    """
    sources, latest = list[int](), dict[object, int]()
    for index, matrix in enumerate(matrices):
        key = matrix.shape, matrix.dtype, matrix.device
        known = latest.get(key, index)
        latest[key] = known if known != index and torch.equal(matrices[known], matrix) else index
        sources.append(latest[key])
    distinct = sorted({*sources}, key=lambda index: -matrices[index].numel())
    solved: dict[int, tuple[Tensor, Tensor]] = {}
    for device in {matrices[index].device for index in distinct}:
        own = [index for index in distinct if matrices[index].device == device]
        solve = _solve_on_gpu if device.type == "cuda" and len(own) > 1 else _solve
        solved |= zip(own, solve([matrices[index] for index in own]), strict=True)
    return [solved[source] for source in sources]


def _solve(matrices: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return [eigenbasis(matrix) for matrix in matrices]


def _solve_on_gpu(matrices: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return `eigenbasis` of each matrix on one GPU, several at once."""
    device, count = matrices[0].device, min(SOLVERS_AT_ONCE, len(matrices))
    torch.linalg.eigh(torch.eye(2, device=device))  # loads torch's solvers, which two threads must not do at once
    current = torch.cuda.current_stream(device)
    streams = [torch.cuda.Stream(device) for _ in range(count)]  # type: ignore[no-untyped-call]

    def solve_share(number: int) -> list[tuple[Tensor, Tensor]]:
        streams[number].wait_stream(current)
        with torch.no_grad(), torch.cuda.stream(streams[number]):
            solved = _solve(matrices[number::count])
        streams[number].synchronize()
        return solved

    results: list[tuple[Tensor, Tensor] | None] = [None] * len(matrices)
    with ThreadPoolExecutor(count) as threads:
        for number, solved in enumerate(threads.map(solve_share, range(count))):
            results[number::count] = solved
    bases = [result for result in results if result is not None]
    for tensor in (tensor for result in bases for tensor in result):
        tensor.record_stream(current)  # which reads it from now on
    return bases


def eigenbasis(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues and eigenvectors of symmetric matrices.

    A factor of few samples has a large null space, on which some GPU solvers fail. They are tried in float64 next, and
    LAPACK last.

    Example:
        >>> eigenbasis(torch.diag(torch.tensor([1.0, 2.0])))[0]
        tensor([1., 2.])
    """
    if matrix.shape[-1] == 1:  # such as the input of a bias, for which no solver need run
        return matrix[..., 0], torch.ones_like(matrix)
    iterated = matrix.device.type == "cuda" and matrix.shape[-1] in ITERATED_SIZES
    for dtype in (torch.float64,) if iterated else (matrix.dtype, torch.float64):
        try:
            values, vectors = torch.linalg.eigh(matrix.to(dtype))
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            continue
        return values.to(matrix), vectors.to(matrix)
    values, vectors = torch.linalg.eigh(matrix.double().cpu())
    return values.to(matrix), vectors.to(matrix)


def at_least_rounding(matrix: Tensor, values: Tensor, vectors: Tensor) -> Tensor:
    """Return the eigenvalues of factors, at least as large as the rounding error of the largest one.

    Below that error, about eps times the largest, an eigenvalue is noise of either sign. If it counted as 0, a sample
    with a very large gradient would free its layer in all other directions. Where the diagonal is 0 the factor is known
    to be 0, such as that of an input that never occurred, and stays so.

    Args:
        matrix: the factor, (n, n), behind any leading axes.
        values: its eigenvalues, (n,).
        vectors: its eigenvectors as columns, (n, n).

    Example:
        >>> matrix = torch.diag(torch.tensor([0.0, 1e9, 1.0]))
        >>> at_least_rounding(matrix, *eigenbasis(matrix)).tolist()
        [0.0, 119.20928955078125, 1000000000.0]
    """
    known = (matrix.diagonal(dim1=-2, dim2=-1) > 0).to(matrix).unsqueeze(-1)
    error = torch.finfo(matrix.dtype).eps * values.amax(-1, keepdim=True)
    return torch.maximum(values, (vectors.square() * known).sum(-2) * error).clamp(min=0)
