"""The terms of a budget: what each parameter spends at a multiplier mu, and its pull; of one model or of many runs."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from mooring.adapters.product import RETREATS, product_grams, remove_displacement, residual_at, retreat
from mooring.adapters.product_factors import ProductFactors
from mooring.backends.eager import apply_pull, chunks, previous_importance, run_in_chunks
from mooring.distributed.dtensor import reduce_over_shards
from mooring.importance import State
from mooring.pulls.budget import Budget, spent_at, spent_each
from mooring.pulls.pull import Number, ParameterPull
from mooring.state.mooring_state import ParameterState

MAX_RESIDUAL = 0.5
"""The part of a budget that may be spent by products whose A has turned away from the anchor."""


class DiagonalTerm:
    """A parameter with a curvature for each weight: spent = sum(F * d^2 / (1 + mu * F)^2) / 2."""

    def __init__(self, state: ParameterState) -> None:
        self.state = state

    def tensors(self) -> State:
        """Return the tensors that `spent_rule` reads."""
        return self.state.pull_tensors()

    def spent(self, mu: Number) -> Tensor:
        """Return `spent_at` of this parameter, (2,) or (2, runs)."""
        dtype, tensors = self.state.compute_dtype, self.tensors()
        sums = []
        for chunk in [tensors] if self.state.runs else chunks(tensors):
            d = chunk["theta"].to(dtype) - chunk["anchor"].to(dtype)
            sums.append(spent_at(previous_importance(chunk).to(dtype), d, mu))
        return torch.stack(sums).sum(0)

    def energy(self) -> Tensor:
        """Return what the parameter spends without a pull."""
        return self.spent(0.0)[0]

    def apply_pull(self, budget: Budget, mu: Tensor) -> None:
        """theta <- anchor + d / (1 + mu * F)."""
        rule, mu = pull_rule(budget), mu.to(self.state.compute_dtype)
        if self.state.runs:
            rule({**self.tensors(), "mu": mu})
        else:
            run_in_chunks(rule, self.tensors(), {"mu": mu}, self.state.compute_dtype)


class KroneckerTerm(DiagonalTerm):
    """A parameter with Kronecker factors, in whose eigenbasis the curvature is diagonal."""

    def __init__(self, state: ParameterState) -> None:
        super().__init__(state)
        assert state.factors is not None
        assert state.factors.basis is not None
        self.factors, self.curvature = state.factors, state.factors.basis[2]
        self.d = self.factors.to_basis(state.parameter.to(state.compute_dtype) - state.device_anchor)

    def tensors(self) -> State:
        """Return the displacement in the eigenbasis and its curvature."""
        return {"d": self.d, "previous": self.curvature}

    def spent(self, mu: Number) -> Tensor:
        """Return `spent_at` in the eigenbasis."""
        return spent_at(self.curvature, self.d, mu)

    def apply_pull(self, budget: Budget, mu: Tensor) -> None:
        """Pull the displacement to 0 in the eigenbasis, and subtract from theta what that removed."""
        pulled, theta = self.d.clone(), self.state.parameter
        tensors = {"theta": pulled, "anchor": pulled.new_zeros(()), "previous": self.curvature}
        pull_rule(budget)({**tensors, "mu": mu.to(pulled.dtype)})
        theta.sub_(self.factors.from_basis(self.d - pulled, theta).to(theta.dtype))


class ProductTerm(DiagonalTerm):
    """The low-rank product of an adapter, by the state of its B; for the present A it is quadratic in B.

    Attributes:
        anchored: whether the product was not 0 at the anchor, so that A may turn away from it.
    """

    def __init__(self, state: ParameterState) -> None:
        super().__init__(state)
        assert isinstance(state.factors, ProductFactors)
        assert state.held_with is not None
        self.factors, self.other = state.factors, state.held_with
        self.b = state.parameter.detach().flatten(1)
        self.a = self.other.parameter.detach().flatten(1)
        self.anchored = self.factors.is_anchored(state.anchor)
        self._update()

    def _update(self) -> None:
        dtype = self.state.compute_dtype
        a, b = (state.device_anchor.flatten(1) for state in (self.other, self.state))
        self.anchors = (a.to(dtype), b.to(dtype)) if self.anchored else None
        self.form = self.factors.form(self.a.to(dtype), self.b.to(dtype), self.anchors)

    def tensors(self) -> State:
        """Return the displacement in the eigenbases and its curvature."""
        return {"d": self.form.d, "previous": self.form.curvature}

    def spent(self, mu: Number) -> Tensor:
        """Return `spent_at` in the eigenbases, without the residual, which no pull of B changes."""
        return spent_at(self.form.curvature, self.form.d, mu)

    def energy(self) -> Tensor:
        """Return what the product spends, with the residual."""
        return self.spent(0.0)[0] + self.form.residual

    def apply_pull(self, budget: Budget, mu: Tensor) -> None:
        """Pull B to its minimum for the present A."""
        self.pull_back(budget, {"mu": mu.to(self.form.d.dtype)})

    def pull_back(self, pull: ParameterPull | Budget, numbers: Mapping[str, Number]) -> None:
        """Pull the displacement to 0 in the eigenbases, and subtract from B what that removed."""
        d, pulled = self.form.d, self.form.d.clone()
        apply_pull(pull, {"theta": pulled, "anchor": d.new_zeros(()), "previous": self.form.curvature, **numbers})
        remove_displacement(self.b, self.form, d - pulled, self.factors.vectors)

    def residuals(self) -> list[Tensor]:
        """Return the residual at each of `RETREATS` towards the anchor."""
        assert self.anchors is not None
        assert self.factors.basis is not None
        assert self.factors.low_rank is not None
        inputs, _, outputs = self.factors.basis
        vectors, (a, b) = self.factors.vectors, self.anchors
        grams = product_grams(self.a.to(a), a, inputs.to(a), self.factors.low_rank.scale)
        start = b if vectors is None else vectors.mT @ b
        return [residual_at(grams, start, outputs, t) for t in RETREATS]

    def move_back(self, fraction: Tensor) -> None:
        """Move A and B towards their anchors until a fraction of their displacement is left."""
        assert self.anchors is not None
        for live, anchor in zip((self.a, self.b), self.anchors, strict=True):
            live.lerp_(anchor.to(live.dtype), (1 - fraction).to(live))
        self._update()


def keep_residual(terms: Iterable[DiagonalTerm], allowed: Number) -> Number:
    """Return what is left of a budget besides the residual of its products, at least a part of it.

    If the residual exceeds `MAX_RESIDUAL` of it, the products are moved towards their anchors, where it is 0.
    """
    products = [term for term in terms if isinstance(term, ProductTerm) and term.anchored]
    if not products:
        return allowed
    device = products[0].b.device
    budget = torch.as_tensor(allowed, dtype=torch.float64, device=device)
    total = _sum([product.form.residual for product in products], device)
    if device.type != "cpu" or bool(total > MAX_RESIDUAL * budget):  # without waiting for a GPU
        tried = [_sum(list(column), device) for column in zip(*(p.residuals() for p in products), strict=True)]
        fraction = retreat(tried, MAX_RESIDUAL * budget)
        for product in products:
            product.move_back(fraction.to(product.b.device))
        total = _sum([product.form.residual for product in products], device)
    return (budget - total).clamp(min=0)


def _sum(values: list[Tensor], device: torch.device) -> Tensor:
    return torch.stack([value.to(device) for value in values]).sum()


def budget_term(state: ParameterState) -> DiagonalTerm | None:
    """Return the term of a parameter; None if nothing is known of its past, or another one's term contains it."""
    if not state.has_previous or state.is_product_input:
        return None
    if isinstance(state.factors, ProductFactors):
        assert state.factors.low_rank is not None
        return ProductTerm(state) if state.factors.low_rank.is_active() else None
    return DiagonalTerm(state) if state.factors is None else KroneckerTerm(state)


def spent_rule(tensors: dict[str, Any]) -> None:
    """Write what each weight spends at mu, and how fast that falls with mu, into `spent` and `slope`."""
    d = tensors["d"] if "d" in tensors else tensors["theta"] - tensors["anchor"]
    spent, slope = spent_each(previous_importance(tensors), d, tensors["mu"])
    tensors["spent"].copy_(spent)
    tensors["slope"].copy_(slope)


def pull_rule(budget: Budget) -> Any:
    """Return the rule of a budget's pull at mu."""
    return lambda tensors: apply_pull(budget, tensors)


def pull_energy(states: Iterable[ParameterState]) -> float:
    """Return the sum of previous * d^2 / 2 over all parameters."""
    terms = [term for state in states if (term := budget_term(state)) is not None]
    spent = reduce_over_shards([term.energy() for term in terms], [term.state.parameter for term in terms])
    return math.fsum(float(value) for value in spent)  # they may be on several devices
