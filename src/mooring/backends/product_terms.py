"""Low-rank products as terms of a budget: all products of one device, quadratic in B for their present A."""

from collections.abc import Hashable, Iterable, Sequence
from operator import is_

import torch
from torch import Tensor

from mooring.backends.batch_term import BatchTerm
from mooring.backends.product_stack import ProductStack, eigen, stack_key
from mooring.curvature.product import Eigen, retreat
from mooring.curvature.product_factors import ProductFactors
from mooring.rules.pull import Number, ParameterPull
from mooring.state.parameter_state import ParameterState

MAX_RESIDUAL = 0.5
"""The part of a budget that may be spent by products whose A has turned away from the anchor."""


def is_product(state: ParameterState) -> bool:
    """Return whether this is the state of a B whose product is held."""
    return isinstance(state.factors, ProductFactors)


def is_active_product(state: ParameterState) -> bool:
    """Return whether this is the state of a B whose product is added at present and has a past."""
    factors = state.factors
    if not isinstance(factors, ProductFactors) or factors.basis is None:
        return False
    return factors.low_rank.is_active()


def eigen_of(matrices: Sequence[Tensor]) -> list[Eigen]:
    """Return the eigenvalues and eigenvectors of matrices, (..., rank, rank); one solution for all of one rank.

    Example:
        >>> [values.tolist() for values, _ in eigen_of([torch.eye(2).unsqueeze(0), torch.ones(1, 1, 1)])]
        [[[1.0, 1.0]], [[1.0]]]
    """
    results: dict[int, Eigen] = {}
    for rank in {matrix.shape[-1] for matrix in matrices}:
        chosen = [index for index, matrix in enumerate(matrices) if matrix.shape[-1] == rank]
        values, vectors = eigen(torch.cat([matrices[index] for index in chosen]))
        sizes = [len(matrices[index]) for index in chosen]
        pairs = zip(torch.split(values, sizes), torch.split(vectors, sizes), strict=True)
        results |= zip(chosen, pairs, strict=True)
    return [results[index] for index in range(len(matrices))]


class ProductTerm(BatchTerm):
    """Low-rank products on one device; the displacements are those of each B from its minimum.

    What is spent at the minimum, because A has turned away from the anchor, is the residual; no pull of B changes it.

    Args:
        states: those states, of one dtype to compute in.
        together: as for `ProductStack`; for a term that is used again and again.
    """

    def __init__(self, states: Sequence[ParameterState], *, together: bool = False) -> None:
        groups: dict[Hashable, list[ParameterState]] = {}
        for index, state in enumerate(states):
            groups.setdefault(stack_key(state) if together else index, []).append(state)
        self.stacks = [ProductStack(group, together=together) for group in groups.values()]
        shapes = [(*stack.outputs.shape, len(stack.states[0].held_with.parameter)) for stack in self.stacks]  # type: ignore[union-attr]
        sizes = [torch.Size(shape).numel() for shape in shapes]
        super().__init__(states, sum(sizes))
        self._views = [
            [part.view(shape) for part, shape in zip(torch.split(flat, sizes), shapes, strict=True)]
            for flat in (self.d, self.curvature, self.removed)
        ]
        self._identity = self._present()
        self.update()

    def _present(self) -> tuple[list[object], list[object]]:
        """Return the objects and values that the term was made from; if one is replaced, a new term is made.

        A model may have hundreds of products, so there is no call for each.
        """
        factors = [state.factors for state in self.states]
        anchors = [state.anchor for state in self.states]
        anchors += [state.held_with.anchor for state in self.states if state.held_with]
        products = [own for own in factors if isinstance(own, ProductFactors)]
        objects: list[object] = [*factors, *anchors, *[own.basis for own in products]]
        scales = [own.low_rank.scale for own in products]
        return objects, [*scales, *[t._version for t in anchors], *[state.parameter.device for state in self.states]]

    def is_valid(self) -> bool:
        """Return whether the products have the factors, anchors, scales and devices that the term was made from."""
        objects, values = self._present()
        return values == self._identity[1] and all(map(is_, objects, self._identity[0]))

    def update(self) -> None:
        """Compute the displacements and curvatures for the present parameters."""
        eigen = eigen_of([stack.gram() for stack in self.stacks])
        for stack, own, d, curvature in zip(self.stacks, eigen, *self._views[:2], strict=True):
            form = stack.form(own)
            d.copy_(form.d)
            curvature.copy_(form.curvature)

    @property
    def residual(self) -> Tensor:
        """The energy at the best B, because A has turned away from the anchor; 0-d, float64."""
        return torch.cat([stack.residual for stack in self.stacks]).sum()

    @property
    def placed_like(self) -> Tensor:
        """A whole tensor, because every rank computes what all products spend."""
        return self.zero

    def energy(self) -> Tensor:
        """Return what the products spend, with the residual."""
        return super().energy() + self.residual

    def pull_with(self, pull: ParameterPull, lr: Number) -> None:
        """Pull each B to its minimum for the present A, with a pull that is no budget."""
        current = {}
        if pull.reads_current:
            current["state_current"] = torch.cat([stack.current_curvature().flatten() for stack in self.stacks])
        self.pull_back(pull, {"lr": lr}, current)

    def finish_pull(self) -> None:
        """Subtract from each B what the pull removes."""
        for stack, removed in zip(self.stacks, self._views[2], strict=True):
            stack.remove(removed)

    def keep_residual(self, allowed: Number) -> Number:
        """Return what is left of a budget besides the residual.

        If the residual exceeds `MAX_RESIDUAL` of it, the products are moved towards their anchors, where it is 0.
        """
        anchored = [stack for stack in self.stacks if stack.anchors is not None]
        if not anchored:
            return allowed
        budget = torch.as_tensor(allowed, dtype=torch.float64, device=self.d.device)
        if self.d.device.type != "cpu" or bool(self.residual > MAX_RESIDUAL * budget):  # without waiting for a GPU
            tried = torch.stack([stack.residuals() for stack in anchored]).sum(0)
            fraction = retreat(tried, MAX_RESIDUAL * budget)
            for stack in anchored:
                stack.move_back(fraction)
            self.update()
        return (budget - self.residual).clamp(min=0)


def product_terms(states: Iterable[ParameterState], *, together: bool = False) -> list[ProductTerm]:
    """Return the terms of the products among some states that are active and have a past."""
    groups: dict[Hashable, list[ParameterState]] = {}
    for state in states:
        if is_active_product(state):
            groups.setdefault((state.parameter.device, state.compute_dtype), []).append(state)
    return [ProductTerm(group, together=together) for group in groups.values()]
