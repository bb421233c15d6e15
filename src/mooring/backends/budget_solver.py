"""Keeps a budget over a whole model: solves for the multiplier of all parameters, and pulls."""

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mooring.backends.batch_term import BatchTerm, BudgetTerm
from mooring.backends.budget_kernels import BudgetKernels
from mooring.backends.budget_terms import DiagonalTerm, budget_term, budget_terms
from mooring.backends.eager import has_compiler
from mooring.backends.kronecker_batch import is_batchable, kronecker_batches
from mooring.backends.product_terms import ProductTerm, is_active_product, is_product, product_terms
from mooring.backends.small_batch import SmallBatch, is_small, small_batches
from mooring.curvature.kronecker_factors import complete_eigenbases
from mooring.distributed.dtensor import reduce_over_shards
from mooring.rules.budget import Budget, budget_solved
from mooring.rules.pull import Number
from mooring.state.offload import AnchorOffload
from mooring.state.parameter_state import ParameterState


class _Plan:
    """The kernels of a step in which everything that is held moves.

    Args:
        key: the parameters of the step.
        kernels: the kernels.
        terms: the low-rank products that are among the terms.
        products: the states of all products; a plan holds as long as the same ones are added to their layers.
    """

    def __init__(
        self, key: Hashable, kernels: BudgetKernels, terms: list[ProductTerm], products: Sequence[ParameterState]
    ) -> None:
        self.key, self.kernels, self.terms, self.products = key, kernels, terms, products
        self.active = [*map(is_active_product, products)]

    def is_for(self, key: Hashable) -> bool:
        """Return whether the plan was made for these parameters, with the products that are active now."""
        return self.key == key and self.active == [*map(is_active_product, self.products)]


class BudgetSolver:
    """A budget and its multiplier, from step to step.

    Args:
        budget: the budget.
        offload: brings offloaded anchors to the device; None if there are none.

    Attributes:
        mu: the multiplier, from which the next step's search starts.
        scale: the factor of what may be spent; other than 1 only if forgetting is measured.
        acts: whether anything is pulled; nothing is where distillation holds all past tasks.
    """

    def __init__(self, budget: Budget, offload: AnchorOffload | None = None) -> None:
        self.budget, self.offload = budget, offload
        self.mu = torch.zeros((), dtype=torch.float64)
        self.scale, self.acts = 1.0, True
        self.batches: list[BatchTerm | SmallBatch] = []
        self.owners: list[object] = []
        self.kernels: BudgetKernels | None = None
        self.plan: _Plan | None = None

    def limit_to_estimate(self) -> None:
        """Let no more than the budget be spent by estimate, from where no measurement has lowered that."""
        self.scale, self.acts = min(self.scale, 1.0), True

    @torch.no_grad()
    def apply_pull(self, states: Collection[ParameterState], moved: Collection[Tensor], task: int) -> None:
        """Pull the parameters that moved until the budget is kept; what the others spent counts too.

        Args:
            states: the states of all moored parameters.
            moved: the parameters that had a gradient in this step.
            task: the number of consolidated tasks.
        """
        if not self.acts:
            return
        key = len(states), *map(id, moved)
        if self.kernels is not None and not self.kernels.is_valid():
            self.invalidate()
        allowed: Number = self.scale * self.budget.allowed(task)
        if self.plan is not None and self.plan.is_for(key):  # a model may have thousands of parameters
            self.plan.kernels.update_batches()
            self._solve_in_kernels(self.plan.kernels, _besides_residuals(self.plan.terms, allowed))
            return
        complete_eigenbases(state.factors for state in states)
        held = [state for state in states if state.has_previous and not state.is_product_input]  # B stands for A too
        moving = set(moved)
        free = self._terms([state for state in held if state.parameter in moving])
        fixed = budget_terms([state for state in held if state.parameter not in moving])
        if not free:
            return
        # mu is where anchors are kept: waiting for an answer costs less than copying anchors once more
        mu = self.mu.to(free[0].state.anchor.device)
        if fixed:
            allowed = (allowed - self._sum(fixed, lambda term: term.energy())).clamp(min=0).to(mu.device)
        products = [term for term in free if isinstance(term, ProductTerm)]
        allowed = _besides_residuals(products, allowed)
        if (kernels := self._kernels(free)) is not None:
            self._solve_in_kernels(kernels, allowed)
            if not fixed:
                self.plan = _Plan(key, kernels, products, [state for state in states if is_product(state)])
            return

        def spent(mu: Tensor, done: Tensor) -> Tensor:
            return self._sum(free, lambda term: term.spent(mu)).to(mu.device)

        self.mu = budget_solved(spent, allowed, mu)
        if self.mu.device.type != "cpu" or bool(self.mu):
            for term in self._staged(free):
                term.apply_pull(self.budget, self.mu)

    def _terms(self, states: Sequence[ParameterState]) -> list[BudgetTerm]:
        """Return the terms of parameters; batches of parameters are kept from step to step."""
        layers = [state for state in states if is_batchable(state)]
        small = [state for state in states if is_small(state)]
        products = [state for state in states if is_active_product(state)]
        batched = {id(state) for state in (*layers, *small, *products)}
        alone = [term for s in states if id(s) not in batched and (term := budget_term(s)) is not None]
        if {id(state) for batch in self.batches for state in batch.states} == batched and all(
            batch.is_valid() for batch in self.batches
        ):
            for batch in self.batches:
                batch.update()
        else:
            products_together = product_terms(products, together=True)
            self.batches = [*kronecker_batches(layers), *small_batches(small), *products_together]
        return [*alone, *self.batches]

    def _solve_in_kernels(self, kernels: BudgetKernels, allowed: Number) -> None:
        mu = self.mu = self.mu.to(kernels.partial_sums.device)
        nats = allowed if isinstance(allowed, Tensor) else torch.full_like(mu, allowed)
        kernels.solve(nats.to(mu), mu)
        kernels.apply_pull(mu)

    def _staged(self, terms: Sequence[BudgetTerm]) -> Iterator[BudgetTerm]:
        """Yield the terms while their anchors are on the device."""
        if self.offload is None:
            yield from terms
            return
        for indices in self.offload.groups([term.state for term in terms]):
            yield from (terms[index] for index in indices)

    def _sum(self, terms: Sequence[BudgetTerm], value: Callable[[BudgetTerm], Tensor]) -> Tensor:
        """Return the sum of a value of all terms, such as what they spend, over all ranks."""
        values, parameters = [], []
        for term in self._staged(terms):
            values.append(value(term))
            parameters.append(term.placed_like)
        return torch.stack(reduce_over_shards(values, parameters)).sum(0)

    def _kernels(self, terms: Sequence[BudgetTerm]) -> BudgetKernels | None:
        """Return kernels for terms if they can do them all; made once until `invalidate`."""
        if not has_compiler(terms[0].state.parameter.device):
            return None
        fusable = [term for term in terms if isinstance(term, DiagonalTerm | BatchTerm)]
        if len(fusable) < len(terms):
            return None
        owners: list[object] = [term if isinstance(term, BatchTerm) else term.state for term in fusable]
        if list(map(id, self.owners)) != list(map(id, owners)):
            self.owners, self.kernels = owners, BudgetKernels.create(fusable, self.budget)
        return self.kernels

    def invalidate(self) -> None:
        """Discard kernels and plans: a tensor that is kept has another address now."""
        self.batches, self.owners, self.kernels, self.plan = [], [], None, None

    def state(self) -> dict[str, Any]:
        """Return what a saved state carries, as plain values."""
        return {"mu": float(self.mu), "scale": self.scale}

    def load_state(self, state: dict[str, Any] | None) -> None:
        """Continue from a saved state; from the beginning if there is none."""
        state = state or {}
        mu, self.scale = state.get("mu", 0.0), float(state.get("scale", 1.0))
        if isinstance(mu, dict):  # of a state that named the group of all parameters
            mu = mu.get("", 0.0)
        self.mu = torch.tensor(mu, dtype=torch.float64)


def _besides_residuals(products: Sequence[ProductTerm], allowed: Number) -> Number:
    """Return what is left of a budget besides the residuals of low-rank products."""
    for product in products:
        allowed = product.keep_residual(allowed)
    return allowed
