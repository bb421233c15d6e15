"""Low-rank products of one shape, computed together, in one kernel for all layers where factors are in one tensor."""

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from mooring.backends.eager import has_compiler
from mooring.curvature.product import (
    RETREATS,
    Eigen,
    ProductForm,
    ProductGrams,
    anchored_form,
    input_gram,
    product_form,
    product_grams,
    residual_at,
)
from mooring.curvature.product_factors import ProductFactors
from mooring.curvature.sides import rows_times
from mooring.distributed.dtensor import PLAIN, gathered, local_part, local_tensor, local_tensors, to_dtensor
from mooring.state.parameter_state import ParameterState

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


def factors_of(state: ParameterState) -> ProductFactors:
    """Return the curvature factors that the state of a B has."""
    assert isinstance(state.factors, ProductFactors)
    return state.factors


def stack_key(state: ParameterState) -> Hashable:
    """Return the key that products share if they are computed together."""
    factors, a = factors_of(state), _first(state)
    shapes = a.shape, state.parameter.shape, factors.past_inputs.shape, factors.past_outputs.shape
    dtypes = a.dtype, state.parameter.dtype, state.compute_dtype, factors.past_inputs.dtype
    return *shapes, *dtypes, state.parameter.device, factors.is_anchored(state.anchor)


def _first(state: ParameterState) -> Tensor:
    """Return the LoRA A matrix paired with this B."""
    assert state.held_with is not None
    return state.held_with.parameter


class ProductStack:
    """Products of one shape.

    Args:
        states: the states of their B, equal in `stack_key`.
        together: whether to move the factors of all layers into one tensor, of which those of each are then a part.

    Attributes:
        anchors: A0 and B0 if the products were not 0 at the anchor, so that A may turn away from them.
        rows: the eigenvectors of M at the last update.
        residual: what the products spend at the best B; one number for each.
    """

    def __init__(self, states: Sequence[ParameterState], *, together: bool) -> None:
        self.states, self.factors = list(states), [factors_of(state) for state in states]
        self.dtype, device = states[0].compute_dtype, states[0].parameter.device
        self.outs, self.ins = len(states[0].parameter), _first(states[0])[0].numel()
        scales = [factors.low_rank.scale for factors in self.factors]
        self.scale = torch.tensor(scales, dtype=torch.float64, device=device).reshape(-1, 1, 1)
        self.outputs = torch.stack([_basis(factors)[2] for factors in self.factors]).to(self.dtype)
        self.diagonal = not _basis(self.factors[0])[1].numel()
        stacks = self._stacked() if together or len(states) == 1 else (None, None)
        self.inputs, self.vectors = stacks
        self.anchors: tuple[Tensor, Tensor] | None = None
        if self.factors[0].is_anchored(states[0].anchor):
            firsts = [_whole_anchor(state.held_with) for state in states if state.held_with]
            self.anchors = self._joined(firsts), self._joined([_whole_anchor(state) for state in states])
            self.start = self.to_basis(self.anchors[1])
        self.rows, self.residual = self.outputs, self.outputs

    def _stacked(self) -> tuple[Tensor | None, Tensor | None]:
        """Move C and the eigenvectors of G of all layers into one tensor each; None if they are stored narrower."""
        if self.factors[0].past_inputs.dtype != self.dtype:
            return None, None
        if len(self.factors) == 1:
            own, vectors_of_one, _ = _basis(self.factors[0])
            return own.unsqueeze(0), None if self.diagonal else vectors_of_one.unsqueeze(0)
        inputs = torch.stack([factors.past_inputs for factors in self.factors])
        vectors = None if self.diagonal else torch.stack([_basis(factors)[1] for factors in self.factors])
        for index, factors in enumerate(self.factors):
            factors.past_inputs = inputs[index]
            basis = _basis(factors)
            factors.basis = inputs[index], basis[1] if vectors is None else vectors[index], basis[2]
        return inputs, vectors

    def _joined(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return tensors of all layers as one, (layers, rows, columns); shards are gathered."""
        with torch.no_grad():
            whole = tensors if PLAIN.issuperset(map(type, tensors)) else [gathered(t) for t in tensors]
            return torch.stack(list(whole)).to(self.dtype).flatten(2)

    def _firsts(self) -> list[Tensor]:
        return [_first(state) for state in self.states]

    def _seconds(self) -> list[Tensor]:
        return [state.parameter for state in self.states]

    def times_inputs(self, rows: Tensor) -> Tensor:
        """Return X C for X (layers, rank, in)."""
        if self.inputs is not None:
            return rows_times(rows, self.inputs, self.ins)
        return self._each(rows, lambda factors, own: rows_times(own, factors.past_factor("inputs"), self.ins))

    def to_basis(self, b: Tensor) -> Tensor:
        """Return B (layers, out, rank) in the eigenbasis of G, in which blocks may add rows of zeros."""
        if self.diagonal:
            return b
        if self.vectors is not None:
            return rows_times(b.mT, self.vectors).mT
        return self._each(b, lambda factors, own: rows_times(own.mT, _basis(factors)[1].to(own)).mT)

    def from_basis(self, d: Tensor) -> Tensor:
        """Return B from its coordinates in the eigenbasis, as it was given to `to_basis`."""
        if self.diagonal:
            return d
        if self.vectors is not None:
            return rows_times(d.mT, self.vectors.mT, self.outs).mT
        return self._each(d, lambda factors, own: rows_times(own.mT, _basis(factors)[1].to(own).mT, self.outs).mT)

    def _each(self, tensors: Tensor, compute: Callable[[ProductFactors, Tensor], Tensor]) -> Tensor:
        """Compute layer by layer, so that only the factors of one at a time are widened."""
        return torch.stack([compute(factors, own) for factors, own in zip(self.factors, tensors, strict=True)])

    def gram(self) -> Tensor:
        """Return M of each product for the present A, (layers, rank, rank); `form` continues from there."""
        a = self._joined(self._firsts())
        if self.anchors is None:
            return input_gram(a, self.times_inputs(a), self.scale)
        self._grams = self.grams(a)
        return self._grams.at(1.0)[0]

    def form(self, eigen_of_gram: Eigen) -> ProductForm:
        """Return the energy of the products for the present A and B, and keep its eigenvectors and residual.

        Args:
            eigen_of_gram: of what `gram` returned.
        """
        b = self._joined(self._seconds())
        if self.anchors is None:
            form = product_form(eigen_of_gram, self.to_basis(b), self.outputs)
        else:
            displaced = self.to_basis(b - self.anchors[1])
            form = anchored_form(self._grams, eigen_of_gram, displaced, self.start, self.outputs)
        self.rows, self.residual = form.rows, form.residual
        return form

    def grams(self, a: Tensor) -> ProductGrams:
        """Return the inner products of the rows of A0 and A - A0."""
        assert self.anchors is not None
        return product_grams(a, self.anchors[0], self.times_inputs, self.scale)

    def current_curvature(self) -> Tensor:
        """Return the curvature on this task in the eigenbases of the last `form`, (layers, out, rank)."""
        a, current = self._joined(self._firsts()), []
        for factors, rows, own, scale in zip(self.factors, self.rows, a, self.scale, strict=True):
            count = max(1, factors.count)
            gram = input_gram(own, rows_times(own, factors.inputs / count, self.ins), scale)
            columns = (rows.double() * (gram @ rows.double())).sum(0).clamp(min=0).to(own)
            current.append(factors.outputs_in_basis().unsqueeze(-1) * columns)
        return torch.stack(current)

    def remove(self, removed: Tensor) -> None:
        """Subtract from each B a displacement that is given in the eigenbases, (layers, out, rank)."""
        change, seconds = self.from_basis(removed @ self.rows.mT), self._seconds()
        parts = change.to(seconds[0].dtype).reshape(-1, *seconds[0].shape).unbind()
        if not PLAIN.issuperset(map(type, seconds)):
            parts = tuple(local_part(part, p) for part, p in zip(parts, seconds, strict=True))
        torch._foreach_sub_(list(local_tensors(seconds)), list(parts))

    def residuals(self) -> Tensor:
        """Return the residual of all products together at each of `RETREATS` towards the anchor."""
        fractions = torch.tensor(RETREATS, dtype=torch.float64, device=self.outputs.device).reshape(-1, 1, 1, 1)
        grams = self.grams(self._joined(self._firsts()))
        return residual_at(grams, self.start, self.outputs, fractions, eigen(grams.at(fractions)[0])).sum(-1)

    def move_back(self, fraction: Tensor) -> None:
        """Move each A and B towards their anchors until a fraction of their displacement is left."""
        assert self.anchors is not None
        for live, anchors in zip((self._firsts(), self._seconds()), self.anchors, strict=True):
            for p, anchor in zip(live, anchors, strict=True):
                part, goal = local_tensor(p), local_part(anchor.reshape(p.shape).to(p.dtype), p)
                part.lerp_(goal, (1 - fraction).to(part))


def _whole_anchor(state: ParameterState) -> Tensor:
    return gathered(to_dtensor(state.device_anchor, state.parameter))


def _basis(factors: ProductFactors) -> tuple[Tensor, Tensor, Tensor]:
    assert factors.basis is not None
    return factors.basis
