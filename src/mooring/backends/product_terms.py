"""The terms of low-rank products in a budget: all products of a device together, for their present A quadratic in B."""

from collections.abc import Hashable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from mooring.adapters.product import Eigen, retreat
from mooring.adapters.product_factors import ProductFactors
from mooring.backends.eager import apply_pull
from mooring.backends.product_stack import ProductStack, factors_of, stack_key
from mooring.importance import State
from mooring.pulls.budget import Budget, spent_at
from mooring.pulls.pull import Number, ParameterPull
from mooring.state.mooring_state import ParameterState

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
    assert factors.low_rank is not None
    return factors.low_rank.is_active()


def eigen_of(matrices: Sequence[Tensor]) -> list[Eigen]:
    """Return the eigenvalues and eigenvectors of matrices, (..., rank, rank); one solution for all of one rank.

    A GPU's solver makes the host wait.

    Example:
        >>> [values.tolist() for values, _ in eigen_of([torch.eye(2).unsqueeze(0), torch.ones(1, 1, 1)])]
        [[[1.0, 1.0]], [[1.0]]]
    """
    results: dict[int, Eigen] = {}
    for rank in {matrix.shape[-1] for matrix in matrices}:
        chosen = [index for index, matrix in enumerate(matrices) if matrix.shape[-1] == rank]
        values, vectors = torch.linalg.eigh(torch.cat([matrices[index] for index in chosen]))
        sizes = [len(matrices[index]) for index in chosen]
        pairs = zip(torch.split(values, sizes), torch.split(vectors, sizes), strict=True)
        results |= zip(chosen, pairs, strict=True)
    return [results[index] for index in range(len(matrices))]


class ProductTerm:
    """Low-rank products on one device, by the states of their B.

    Args:
        states: those states, of one dtype to compute in.
        together: as for `ProductStack`; for a term that is used again and again.

    Attributes:
        d: the displacements of all products from the minimum, in the eigenbases.
        curvature: that of each entry of d.
    """

    def __init__(self, states: Sequence[ParameterState], *, together: bool = False) -> None:
        self.states, self.state = list(states), states[0]
        groups: dict[Hashable, list[ParameterState]] = {}
        for index, state in enumerate(states):
            groups.setdefault(stack_key(state) if together else index, []).append(state)
        self.stacks = [ProductStack(group, together=together) for group in groups.values()]
        shapes = [(*stack.outputs.shape, len(stack.states[0].held_with.parameter)) for stack in self.stacks]  # type: ignore[union-attr]
        sizes = [torch.Size(shape).numel() for shape in shapes]
        self.d = torch.zeros(sum(sizes), dtype=self.state.compute_dtype, device=self.state.parameter.device)
        self.curvature, self.before, self.zero = self.d.clone(), self.d.clone(), self.d.new_zeros(())
        self._views = [
            [part.view(shape) for part, shape in zip(torch.split(flat, sizes), shapes, strict=True)]
            for flat in (self.d, self.curvature, self.before)
        ]
        self._identity = self._present()
        self.update()

    def _present(self) -> list[tuple[object, ...]]:
        """Return what the term was made from; it is made anew if any of that is replaced."""
        present: list[tuple[object, ...]] = []
        for state in self.states:
            factors, first = factors_of(state), state.held_with
            assert first is not None
            assert factors.low_rank is not None
            anchors = state.anchor, state.anchor._version, first.anchor, first.anchor._version
            present.append((factors, factors.basis, factors.low_rank.scale, *anchors))
        return present

    def is_valid(self) -> bool:
        """Return whether the products have the factors, anchors, scales and devices that the term was made from."""
        if any(state.parameter.device != self.d.device for state in self.states):
            return False
        pairs = zip(self._present(), self._identity, strict=True)
        return all(
            a is b or (isinstance(a, int | float) and a == b) for one in pairs for a, b in zip(*one, strict=True)
        )

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

    def tensors(self) -> State:
        """Return the tensors that `spent_rule` and `pull_rule` read; their addresses stay."""
        return {"theta": self.d, "anchor": self.zero, "previous": self.curvature}

    def spent(self, mu: Number) -> Tensor:
        """Return `spent_at` in the eigenbases, without the residual, which no pull of B changes."""
        return spent_at(self.curvature, self.d, mu)

    def energy(self) -> Tensor:
        """Return what the products spend, with the residual."""
        return self.spent(0.0)[0] + self.residual

    def apply_pull(self, budget: Budget, mu: Tensor) -> None:
        """Pull each B to its minimum for the present A."""
        self.pull_back(budget, {"mu": mu.to(self.d.dtype)})

    def pull_back(self, pull: ParameterPull | Budget, numbers: Mapping[str, Number]) -> None:
        """Pull the displacements to 0 in the eigenbases, and subtract from B what that removed."""
        self.begin_pull()
        tensors = {**self.tensors(), **numbers}
        if isinstance(pull, ParameterPull) and pull.reads_current:
            tensors["state_current"] = torch.cat([stack.current_curvature().flatten() for stack in self.stacks])
        apply_pull(pull, tensors)
        self.finish_pull()

    def begin_pull(self) -> None:
        """Remember the displacements; then `tensors` may be pulled."""
        self.before.copy_(self.d)

    def finish_pull(self) -> None:
        """Subtract from B what was removed since `begin_pull`."""
        self.before.sub_(self.d)
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
