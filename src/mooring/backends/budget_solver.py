"""Keeps a budget over a whole model: solves for one multiplier of all parameters, or one per layer, and pulls."""

from collections.abc import Collection, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mooring.backends.budget_kernels import BudgetKernels
from mooring.backends.budget_terms import Term, budget_term, budget_terms
from mooring.backends.eager import has_compiler
from mooring.backends.product_terms import ProductTerm, is_active_product, product_terms
from mooring.distributed.dtensor import reduce_over_shards
from mooring.importance import State
from mooring.pulls.budget import Budget, budget_solved
from mooring.pulls.pull import Number
from mooring.state.mooring_state import ParameterState
from mooring.state.offload import AnchorOffload
from mooring.state.selection import layer_of


class BudgetSolver:
    """A budget and its multipliers, from step to step.

    Args:
        budget: the budget.
        offload: brings offloaded anchors to the device.
        reused: whether it is used in many steps, for which memory is arranged.

    Attributes:
        mu: the multiplier of each group of parameters, from which the next step's search starts.
        scale: the factor of what may be spent; other than 1 only if forgetting is measured.
    """

    def __init__(self, budget: Budget, offload: AnchorOffload, *, reused: bool = True) -> None:
        self.budget, self.offload, self.reused = budget, offload, reused
        self.products: dict[str, list[ProductTerm]] = {}
        self.mu: State = {}
        self.scale = 1.0
        self.kernels: dict[str, tuple[list[ParameterState | ProductTerm], BudgetKernels | None]] = {}
        self.plan: tuple[Hashable, dict[str, BudgetKernels]] = None, {}

    @torch.no_grad()
    def apply_pull(self, states: Collection[ParameterState], moved: Collection[Tensor], task: int) -> None:
        """Pull the parameters that moved until the budget is kept; what the others spent counts too.

        Args:
            states: the states of all moored parameters.
            moved: the parameters that had a gradient in this step.
            task: the number of consolidated tasks.
        """
        key = len(states), *map(id, moved)
        if not all(kernels.is_valid() for _, kernels in self.kernels.values() if kernels is not None):
            self.invalidate()
        if self.plan[0] == key:  # a model may have thousands of parameters
            for name, kernels in self.plan[1].items():
                self._solve_in_kernels(name, kernels, self.scale * self.budget.allowed(task, len(self.plan[1])))
            return
        groups: dict[str, list[ParameterState]] = {}
        for state in states:
            if state.has_previous and not state.is_product_input:
                groups.setdefault(layer_of(state.name) if self.budget.per == "layer" else "", []).append(state)
        moving, plan = set(moved), {}
        for name, members in groups.items():
            free = self._terms(name, [state for state in members if state.parameter in moving])
            fixed = budget_terms([state for state in members if state.parameter not in moving])
            if not free:
                continue
            allowed: Number = self.scale * self.budget.allowed(task, len(groups))
            # mu is where anchors are kept: waiting for an answer costs less than copying anchors once more
            mu = self._initial_mu(name, free[0].state.anchor.device)
            if fixed:
                allowed = (allowed - self._energy(fixed)).clamp(min=0).to(mu.device)
            products = [term for term in free if isinstance(term, ProductTerm)]
            for product in products:
                allowed = product.keep_residual(allowed)
            if (group_kernels := self._kernels(name, free)) is not None:
                self._solve_in_kernels(name, group_kernels, allowed)
                if not fixed and not products:
                    plan[name] = group_kernels
                continue
            mu = budget_solved(lambda mu, done, terms=free: self._spent(terms, mu), allowed, mu)  # type: ignore[misc]
            self.mu[name] = mu
            if mu.device.type != "cpu" or bool(mu):
                for term in self._staged(free):
                    term.apply_pull(self.budget, mu)
        if groups and len(plan) == len(groups):
            self.plan = key, plan

    def _terms(self, name: str, states: Sequence[ParameterState]) -> list[Term]:
        """Return the terms of the parameters of a group; those of products are kept from step to step."""
        alone = [term for state in states if (term := budget_term(state)) is not None]
        active = [state for state in states if is_active_product(state)]
        known = self.products.get(name, [])
        same = {id(state) for term in known for state in term.states} == set(map(id, active))
        if active and same and all(term.is_valid() for term in known):
            for product in known:
                product.update()
        else:
            known = self.products[name] = product_terms(active, together=self.reused)
        return [*alone, *known]

    def _initial_mu(self, name: str, device: torch.device) -> Tensor:
        """Return the multiplier of the step before."""
        return self.mu.get(name, torch.zeros((), dtype=torch.float64)).to(device)

    def _solve_in_kernels(self, name: str, kernels: BudgetKernels, allowed: Number) -> None:
        mu = self.mu[name] = self._initial_mu(name, kernels.partial_sums.device)
        nats = allowed if isinstance(allowed, Tensor) else torch.full_like(mu, allowed)
        kernels.solve(nats.to(mu), mu)
        kernels.apply_pull(mu)

    def _staged(self, terms: Sequence[Term]) -> Iterator[Term]:
        """Yield the terms while their anchors are on the device."""
        for indices in self.offload.groups([term.state for term in terms]):
            yield from (terms[index] for index in indices)

    def _spent(self, terms: Sequence[Term], mu: Number) -> Tensor:
        """Return what all terms spend at mu, on the device of mu."""
        spent, parameters = [], []
        for term in self._staged(terms):
            spent.append(term.spent(mu))
            parameters.append(term.state.parameter)
        total = torch.stack(reduce_over_shards(spent, parameters)).sum(0)
        return total.to(mu.device) if isinstance(mu, Tensor) else total

    def _energy(self, terms: Sequence[Term]) -> Tensor:
        """Return what all terms spend without a pull."""
        spent = [term.energy() for term in self._staged(terms)]
        return torch.stack(reduce_over_shards(spent, [term.state.parameter for term in terms])).sum(0)

    def _kernels(self, name: str, terms: Sequence[Term]) -> BudgetKernels | None:
        """Return kernels for a group of terms if they can do them all; made once until `invalidate`.

        A solver that is used once has none: to write and load their code takes longer than a solution without them.
        """
        if not self.reused or not has_compiler(terms[0].state.parameter.device):
            return None
        owners = [term if isinstance(term, ProductTerm) else term.state for term in terms]
        known, kernels = self.kernels.get(name, ([], None))
        if list(map(id, known)) != list(map(id, owners)):
            kernels = BudgetKernels.create(terms, self.budget)
            self.kernels[name] = owners, kernels
        return kernels

    def invalidate(self) -> None:
        """Discard kernels and plans: a tensor that is kept has another address now."""
        self.kernels, self.plan, self.products = {}, (None, {}), {}

    def state(self) -> dict[str, Any]:
        """Return what a saved state carries, as plain values."""
        return {"mu": {name: float(mu) for name, mu in self.mu.items()}, "scale": self.scale}

    def load_state(self, state: dict[str, Any] | None) -> None:
        """Continue from a saved state; from the beginning if there is none."""
        state = state or {}
        mu, self.scale = state.get("mu", {}), float(state.get("scale", 1.0))
        self.mu = {name: torch.tensor(value, dtype=torch.float64) for name, value in mu.items()}
