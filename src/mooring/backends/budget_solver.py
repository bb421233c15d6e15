"""How a budget is kept over a whole model: one multiplier for all parameters, or for each layer, solved for."""

import math
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mooring.backends.budget_kernels import BudgetKernels
from mooring.backends.chunks import tiled
from mooring.backends.kernels.codegen import has_compiler
from mooring.distributed.dtensor import reduce_over_shards
from mooring.importance import State
from mooring.pulls.budget import Budget, budget_solved, spent_at
from mooring.pulls.run_axis import Number
from mooring.state.mooring_state import ParameterState
from mooring.state.offload import AnchorOffload
from mooring.state.quantization import past
from mooring.state.selection import layer_of

__all__ = ["BudgetSolver", "budget_term", "energy"]


class DiagonalTerm:
    """What holds one parameter, weight by weight: spent = sum(F * d^2 / (1 + mu * F)^2) / 2."""

    def __init__(self, m: ParameterState) -> None:
        self.m = m

    def _tiles(self) -> Iterable[tuple[Tensor, Tensor, Tensor]]:
        wide = self.m.wide
        for piece in tiled(self.m.held()):
            yield piece["theta"], piece["anchor"].to(wide), past(piece).to(wide)

    def spent(self, mu: Number) -> Tensor:
        """`spent_at` of this parameter."""
        each = [spent_at(previous, theta.to(self.m.wide) - anchor, mu) for theta, anchor, previous in self._tiles()]
        return torch.stack(each).sum(0)

    def pull_back(self, budget: Budget, mu: Tensor) -> None:
        """theta <- anchor + d / (1 + mu * F)."""
        for theta, anchor, previous in self._tiles():
            rate = budget.rate(previous, mu.to(self.m.wide))
            theta.copy_(torch.lerp(theta.to(self.m.wide), anchor, rate))


class KroneckerTerm(DiagonalTerm):
    """The same in the basis of a layer's Kronecker factors, in which its curvature is diagonal."""

    def __init__(self, m: ParameterState) -> None:
        super().__init__(m)
        assert m.factor is not None
        assert m.factor.basis is not None
        self.factor, self.curvature = m.factor, m.factor.basis[2]
        self.turned = m.factor.turned(m.parameter.to(m.wide) - m.near)

    def spent(self, mu: Number) -> Tensor:
        """`spent_at` in the basis."""
        return spent_at(self.curvature, self.turned, mu)

    def pull_back(self, budget: Budget, mu: Tensor) -> None:
        """What the pull takes away, turned back."""
        taken = self.turned * budget.rate(self.curvature, mu.to(self.curvature.dtype))
        theta = self.m.parameter
        theta.sub_(self.factor.turned_back(taken, theta).to(theta.dtype))


def budget_term(m: ParameterState) -> DiagonalTerm | None:
    """What holds a parameter; None where nothing is known of its past."""
    if m.factor is not None:
        return None if m.factor.basis is None else KroneckerTerm(m)
    return None if m.previous is None else DiagonalTerm(m)


def energy(records: Iterable[ParameterState]) -> float:
    """sum of previous * d^2 / 2 over all parameters."""
    lines = [line for m in records if (line := budget_term(m)) is not None]
    spent = reduce_over_shards([line.spent(0.0) for line in lines], [line.m.parameter for line in lines])
    return math.fsum(float(each[0]) for each in spent)  # they may be on several devices


class BudgetSolver:
    """A budget and what it takes to keep it, from step to step.

    Args:
        budget: what may be spent.
        staging: brings anchors to the device; None where they are there.

    Attributes:
        mu: the multiplier of each group of parameters, where the next step's search begins.
    """

    def __init__(self, budget: Budget, staging: AnchorOffload | None = None) -> None:
        self.budget, self.staging = budget, staging or AnchorOffload(1)
        self.mu: State = {}
        self.known: dict[str, tuple[list[ParameterState], BudgetKernels | None]] = {}
        self.plan: tuple[Hashable, dict[str, BudgetKernels]] = None, {}

    @torch.no_grad()
    def spend(self, records: Collection[ParameterState], moved: Collection[Tensor], task: int) -> None:
        """Pull the parameters that moved back until the budget is kept; what the others spent is counted in.

        Args:
            records: of all moored parameters.
            moved: those that had a gradient in this step.
            task: how many tasks were consolidated.
        """
        of = len(records), *map(id, moved)
        if not all(found.still() for _, found in self.known.values() if found is not None):
            self.forget()
        if self.plan[0] == of:  # a model may have thousands of parameters
            for name, together in self.plan[1].items():
                self._solve_together(name, together, self.budget.allowed(task, len(self.plan[1])))
            return
        groups: dict[str, list[DiagonalTerm]] = {}
        for m in records:
            if (line := budget_term(m)) is not None:
                groups.setdefault(layer_of(m.name) if self.budget.per == "layer" else "", []).append(line)
        moving, plan = set(moved), {}
        for name, lines in groups.items():
            mine, rest = ([line for line in lines if (line.m.parameter in moving) == moves] for moves in (True, False))
            if not mine:
                continue
            allowed: Number = self.budget.allowed(task, len(groups))
            # to bring anchors once more costs more than to wait for an answer: mu is where they are kept
            begin = self._begin(name, mine[0].m.anchor.device)
            if rest:
                allowed = (allowed - self._spent(rest, 0.0)[0]).clamp(min=0).to(begin.device)
            if (found := self._together(name, mine)) is not None:
                self._solve_together(name, found, allowed)
                if not rest:
                    plan[name] = found
                continue
            mu = budget_solved(lambda mu, done, lines=mine: self._spent(lines, mu), allowed, begin)  # type: ignore[misc]
            self.mu[name] = mu
            if mu.device.type != "cpu" or bool(mu):
                for line in self._staged(mine):
                    line.pull_back(self.budget, mu)
        if groups and len(plan) == len(groups):
            self.plan = of, plan

    def _begin(self, name: str, device: torch.device) -> Tensor:
        """Where the search begins: at the multiplier of the step before."""
        return self.mu.get(name, torch.zeros((), dtype=torch.float64)).to(device)

    def _solve_together(self, name: str, lines: BudgetKernels, allowed: Number) -> None:
        """In kernels, without waiting for them."""
        mu = self.mu[name] = self._begin(name, lines.partial.device)
        nats = allowed if isinstance(allowed, Tensor) else torch.full_like(mu, allowed)
        lines.solve(nats.to(mu), mu)
        lines.pull_back(mu)

    def _staged(self, lines: Sequence[DiagonalTerm]) -> Iterator[DiagonalTerm]:
        """One after the other, while its anchor is at hand."""
        for places in self.staging.over([line.m for line in lines]):
            yield from (lines[place] for place in places)

    def _spent(self, lines: Sequence[DiagonalTerm], mu: Number) -> Tensor:
        """What all of them would spend, where mu is."""
        each = [(line.spent(mu), line.m.parameter) for line in self._staged(lines)]
        summed = torch.stack(reduce_over_shards(*map(list, zip(*each, strict=True)))).sum(0)  # type: ignore[arg-type]
        return summed.to(mu.device) if isinstance(mu, Tensor) else summed

    def _together(self, name: str, mine: Sequence[DiagonalTerm]) -> BudgetKernels | None:
        """The same lines as one, where kernels can do it; found once until `forget`."""
        if not has_compiler(mine[0].m.parameter.device):
            return None
        owners = [line.m for line in mine]
        known, found = self.known.get(name, ([], None))
        if [id(m) for m in known] != [id(m) for m in owners]:
            found = BudgetKernels.of(owners, self.budget)
            self.known[name] = owners, found
        return found

    def forget(self) -> None:
        """What is kept lies elsewhere from now on."""
        self.known, self.plan = {}, (None, {})

    def told(self) -> dict[str, Any]:
        """What a saved state carries, as plain values."""
        return {"mu": {name: float(mu) for name, mu in self.mu.items()}}

    def resume(self, told: dict[str, Any] | None) -> None:
        """Go on from what was told; from the beginning where nothing was."""
        mu = (told or {}).get("mu", {})
        self.mu = {name: torch.tensor(value, dtype=torch.float64) for name, value in mu.items()}
