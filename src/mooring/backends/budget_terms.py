"""The terms of a budget: what each parameter spends at a multiplier mu, and its pull; of one model or of many runs."""

import math
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from mooring.backends.batch_term import BudgetTerm
from mooring.backends.eager import apply_pull, chunks, previous_importance, run_in_chunks
from mooring.backends.product_terms import is_product, product_terms
from mooring.curvature.kronecker_factors import complete_eigenbases
from mooring.distributed.dtensor import reduce_over_shards
from mooring.rules import State
from mooring.rules.budget import Budget, spent_at, spent_each
from mooring.rules.pull import Number
from mooring.state.parameter_state import ParameterState


class DiagonalTerm(BudgetTerm):
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
        self.factors, self.curvature = state.factors, state.factors.basis[2].to(state.compute_dtype)
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


def budget_term(state: ParameterState) -> DiagonalTerm | None:
    """Return the term of a parameter by itself; None if nothing is known of its past, or it belongs to a product."""
    if not state.has_previous or state.is_product_input or is_product(state):
        return None
    return DiagonalTerm(state) if state.factors is None else KroneckerTerm(state)


def budget_terms(states: Collection[ParameterState]) -> list[BudgetTerm]:
    """Return the terms of all parameters that have an importance over past tasks."""
    complete_eigenbases(state.factors for state in states)
    alone = [term for state in states if (term := budget_term(state)) is not None]
    return [*alone, *product_terms(states)]


def spent_rule(tensors: dict[str, Any]) -> None:
    """Write what each weight spends at mu, and how fast that falls with mu, into `spent` and `slope`."""
    d = tensors["d"] if "d" in tensors else tensors["theta"] - tensors["anchor"]
    spent, slope = spent_each(previous_importance(tensors), d, tensors["mu"])
    tensors["spent"].copy_(spent)
    tensors["slope"].copy_(slope)


def pull_rule(budget: Budget) -> Any:
    """Return the rule of a budget's pull at mu."""
    return lambda tensors: apply_pull(budget, tensors)


def pull_energy(states: Collection[ParameterState]) -> float:
    """Return the sum of previous * d^2 / 2 over all parameters."""
    terms = budget_terms(states)
    spent = reduce_over_shards([term.energy() for term in terms], [term.placed_like for term in terms])
    return math.fsum(float(value) for value in spent)  # they may be on several devices
