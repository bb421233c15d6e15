"""Tensors of a parameter whose number of rows changed, such as an embedding with new tokens; new rows are 0."""

import torch
from torch import Tensor

from mooring.curvature.kronecker_factors import KroneckerFactors
from mooring.distributed.dtensor import sharded
from mooring.state.quantization import QuantizedImportance


def keeps_rows(old: Tensor, new: Tensor) -> bool:
    """Return whether a parameter that replaces another one begins with its values, as a resized embedding does.

    Example:
        >>> old = torch.arange(6.0).view(3, 2)
        >>> keeps_rows(old, torch.cat([old, torch.ones(2, 2)])), keeps_rows(old, torch.ones(3, 2))
        (True, False)
    """
    if sharded(old) or sharded(new) or old.ndim != new.ndim or not new.ndim:
        return False
    if old.shape[1:] != new.shape[1:] or (old.dtype, old.device) != (new.dtype, new.device):
        return False
    rows = min(len(old), len(new))
    return torch.equal(old[:rows], new[:rows])


def copy_rows(source: Tensor, target: Tensor) -> Tensor:
    """Copy the rows that both have into `target`, and return it; a single number is copied as it is.

    Example:
        >>> copy_rows(torch.tensor([1.0, 2.0]), torch.zeros(3))
        tensor([1., 2., 0.])
    """
    if source.ndim:
        rows = min(len(source), len(target))
        target[:rows] = source[:rows]
    else:
        target.copy_(source)
    return target


def resized_importance(
    previous: Tensor | QuantizedImportance, shape: torch.Size, rows: int
) -> Tensor | QuantizedImportance:
    """Return the importance of a parameter of this shape for another number of rows."""
    if isinstance(previous, QuantizedImportance):
        return QuantizedImportance(*(_resized(tensor, rows) for tensor in previous.slots().values()))
    return _resized(previous.expand(shape), rows)


def resized_factors(factors: KroneckerFactors, rows: int) -> KroneckerFactors:
    """Return factors for another number of outputs."""
    outputs, past_outputs = (
        _resized(_resized(matrix, rows).mT, rows).mT.contiguous() for matrix in (factors.outputs, factors.past_outputs)
    )
    new = KroneckerFactors(factors.inputs, outputs, factors.past_inputs, past_outputs, factors.count, factors.tasks)
    new.basis_dtype = factors.basis_dtype
    new.update_eigenbasis()
    return new


def _resized(tensor: Tensor, rows: int) -> Tensor:
    return copy_rows(tensor, tensor.new_zeros(rows, *tensor.shape[1:]))
