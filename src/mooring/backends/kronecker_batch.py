"""All parameters with Kronecker factors as one term of a budget: layers of equal shape share batched products."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mooring.backends.batch_term import BatchTerm
from mooring.curvature.factor_blocks import rotate
from mooring.curvature.product_factors import ProductFactors
from mooring.state import offload
from mooring.state.parameter_state import ParameterState

MAX_BATCH_SIZE = 1 << 26
"""Weights in one batched product; its intermediate results have this size."""


@dataclass
class _ShapeGroup:
    """Layers of equal shape.

    Attributes:
        states: their states.
        inputs: the eigenvectors of A of each layer, (layers, in, in), or of its blocks, (layers, blocks, size, size).
            The groups of a convolution count as layers.
        outputs: the eigenvectors of G, likewise.
        d: the displacements in the eigenbases, (layers, out, in); a part of those of the whole batch.
        removed: what a pull removes of them, likewise.
    """

    states: list[ParameterState]
    inputs: Tensor
    outputs: Tensor
    d: Tensor
    removed: Tensor

    @torch.no_grad()
    def update(self) -> None:
        """d <- U_G' (theta - anchor) U_A."""
        d = self._displacements().view(self.d.shape)
        if self.inputs.ndim > 3:
            rotate(self.outputs.mT, d, self.inputs, out=self.d)
        else:
            torch.bmm(torch.bmm(self.outputs.mT, d), self.inputs, out=self.d)

    @torch.no_grad()
    def subtract(self) -> None:
        """theta <- theta - U_G removed U_A'."""
        thetas = [state.theta for state in self.states]
        if self.inputs.ndim > 3:
            removed = rotate(self.outputs, self.removed, self.inputs.mT)
        else:
            removed = torch.bmm(torch.bmm(self.outputs, self.removed), self.inputs.mT)
        removed = removed.to(thetas[0].dtype)
        parts = removed.view(len(thetas), -1).unbind()
        torch._foreach_sub_(thetas, [part.view_as(t) for part, t in zip(parts, thetas, strict=True)])

    def _displacements(self) -> Tensor:
        """Return theta - anchor of all layers, in the dtype of the bases."""
        thetas, anchors = zip(*((state.theta, state.anchor) for state in self.states), strict=True)
        if thetas[0].dtype == anchors[0].dtype == self.d.dtype:
            parts = torch._foreach_sub(thetas, anchors)
            return parts[0].contiguous() if len(parts) == 1 else torch.stack(parts)
        wide = torch.promote_types(torch.promote_types(thetas[0].dtype, anchors[0].dtype), torch.float32)
        return torch.stack(thetas).to(wide).sub_(torch.stack(anchors)).to(self.d.dtype)


class KroneckerBatch(BatchTerm):
    """Parameters with Kronecker factors, as one term of a budget.

    In their eigenbases all curvatures are diagonal, so the displacements and the curvatures of all layers lie one after
    the other in two vectors, of which a solver takes one sum. The layers' own eigenbases become parts of the batch. All
    of it has the dtype of the bases, bfloat16 for half-precision parameters, and products are summed in float32.

    Args:
        states: states that `is_batchable`, on one device and of one dtype.
    """

    def __init__(self, states: Sequence[ParameterState]) -> None:
        super().__init__(states, sum(state.parameter.numel() for state in states), _basis(states[0])[2].dtype)
        self._factors = [state.factors for state in states]
        self.groups: list[_ShapeGroup] = []
        begin = 0
        for members in _equal_shapes(states):
            end = begin + sum(state.parameter.numel() for state in members)
            self.groups.append(self._group(members, slice(begin, end)))
            begin = end
        self.update()

    def _group(self, states: list[ParameterState], part: slice) -> _ShapeGroup:
        """Stack the eigenbases of layers of equal shape."""
        shape: tuple[int, ...] = len(states), *_basis(states[0])[2].shape
        bases = [_basis(state) for state in states]
        inputs, outputs = (_stack([basis[side] for basis in bases]) for side in (0, 1))
        curvature = self.curvature[part].view(shape)
        for index, (state, basis) in enumerate(zip(states, bases, strict=True)):
            curvature[index].copy_(basis[2])
            assert state.factors is not None
            state.factors.basis = inputs[index], outputs[index], curvature[index]
        if len(shape) > 3:
            inputs, outputs, shape = inputs.flatten(0, 1), outputs.flatten(0, 1), (-1, *shape[2:])
        return _ShapeGroup(states, inputs, outputs, self.d[part].view(shape), self.removed[part].view(shape))

    def is_valid(self) -> bool:
        """Return whether the parameters still have the factors and dtypes that the batch was made for."""
        factors = zip(self.states, self._factors, strict=True)
        return all(state.factors is known and is_batchable(state) for state, known in factors)

    def update(self) -> None:
        """Read the parameters: compute their displacements in the eigenbases."""
        for group in self.groups:
            group.update()

    def finish_pull(self) -> None:
        """Subtract from the parameters what the pull removes."""
        for group in self.groups:
            group.subtract()


def is_batchable(state: ParameterState) -> bool:
    """Return whether a parameter can be in a batch: plain, with factors of past tasks and its anchor at hand."""
    if state.factors is None or isinstance(state.factors, ProductFactors) or state.factors.basis is None:
        return False
    if state.runs or offload.is_offloaded(state):
        return False
    dtype = state.factors.basis_dtype or state.compute_dtype
    return type(state.parameter) in (nn.Parameter, Tensor) and state.factors.basis[2].dtype == dtype


def kronecker_batches(states: Sequence[ParameterState]) -> list[KroneckerBatch]:
    """Return batches of states that `is_batchable`, one for each device and dtype."""
    by_kind: dict[tuple[torch.device, torch.dtype, torch.dtype], list[ParameterState]] = {}
    for state in states:
        kind = state.parameter.device, state.compute_dtype, _basis(state)[2].dtype
        by_kind.setdefault(kind, []).append(state)
    return [KroneckerBatch(members) for members in by_kind.values()]


def _basis(state: ParameterState) -> tuple[Tensor, Tensor, Tensor]:
    assert state.factors is not None
    assert state.factors.basis is not None
    return state.factors.basis


def _equal_shapes(states: Sequence[ParameterState]) -> Iterator[list[ParameterState]]:
    """Yield states of equal shape and dtypes, with at most MAX_BATCH_SIZE weights at once."""
    by_shape: dict[object, list[ParameterState]] = {}
    for state in states:
        key = _basis(state)[2].shape, state.parameter.dtype, state.anchor.dtype
        by_shape.setdefault(key, []).append(state)
    for members in by_shape.values():
        count = max(1, MAX_BATCH_SIZE // max(1, members[0].parameter.numel()))
        for begin in range(0, len(members), count):
            yield members[begin : begin + count]


def _stack(matrices: list[Tensor]) -> Tensor:
    """Return matrices as one tensor, without a copy if there is a single one."""
    return matrices[0].unsqueeze(0) if len(matrices) == 1 else torch.stack(matrices)
