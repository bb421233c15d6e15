"""How a budget is kept over a whole model: one multiplier for all parameters, or for each layer, solved for."""

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor

from mooring.importance import State
from mooring.ledger import Moored
from mooring.pulls.budget import Budget, budget_solved, spent_at
from mooring.runs import Number
from mooring.selection import layer_of
from mooring.tiles import tiles

__all__ = ["Spending"]


class Spending:
    """A budget and what it takes to keep it, from step to step.

    Args:
        budget: what may be spent.

    Attributes:
        mu: the multiplier of each group of parameters, where the next step's search begins.
        factor: the true rise of the loss over the estimated one, as calibrated; 1 where it was not.
    """

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.mu: State = {}
        self.factor = 1.0

    @torch.no_grad()
    def spend(self, records: Iterable[Moored], moved: Collection[Tensor], task: int) -> None:
        """Pull the parameters that moved back until the budget is kept; what the others spent is counted in.

        Args:
            records: of all moored parameters.
            moved: those that had a gradient in this step.
            task: how many tasks were consolidated.
        """
        groups: dict[str, list[Moored]] = {}
        for m in records:
            if m.previous is not None:
                groups.setdefault(layer_of(m.name) if self.budget.per == "layer" else "", []).append(m)
        for name, members in groups.items():
            allowed: Number = self.budget.allowed(task, len(groups)) / self.factor
            mine = [m for m in members if m.parameter in moved]
            if not mine:
                continue
            if len(mine) < len(members):
                resting = _sums([m for m in members if m.parameter not in moved], 0.0)[0]
                allowed = (allowed - resting).clamp(min=0)
            begin = self.mu.get(name, torch.zeros((), dtype=torch.float64))
            mu = budget_solved(lambda mu, done, mine=mine: _sums(mine, mu), allowed, begin.to(mine[0].anchor.device))  # type: ignore[misc]
            self.mu[name] = mu
            if mu.device.type != "cpu" or bool(mu):
                for m in mine:
                    _pull_back(self.budget, m, mu)

    def told(self) -> dict[str, Any]:
        """What a saved state carries, as plain values."""
        return {"mu": {name: float(mu) for name, mu in self.mu.items()}, "factor": self.factor}

    def resume(self, told: dict[str, Any] | None) -> None:
        """Go on from what was told; from the beginning where nothing was."""
        mu = (told or {}).get("mu", {})
        self.mu = {name: torch.tensor(value, dtype=torch.float64) for name, value in mu.items()}
        self.factor = (told or {}).get("factor", 1.0)


def _sums(members: Collection[Moored], mu: Number) -> Tensor:
    """`spent_at`, over all of them."""
    total = torch.zeros(2, dtype=torch.float64, device=next(iter(members)).anchor.device)
    for m in members:
        assert m.previous is not None
        for theta, anchor, previous in tiles([m.parameter, m.anchor, m.previous]):
            total += spent_at(previous.to(m.wide), theta.to(m.wide) - anchor, mu)
    return total


def _pull_back(budget: Budget, m: Moored, mu: Tensor) -> None:
    """theta <- anchor + d / (1 + mu * F)."""
    assert m.previous is not None
    for theta, anchor, previous in tiles([m.parameter, m.anchor, m.previous]):
        rate = budget.rate(previous.to(m.wide), mu.to(m.wide))
        if theta.dtype == m.wide:
            theta.lerp_(anchor.to(m.wide), rate)
        else:
            theta.copy_(torch.lerp(theta.to(m.wide), anchor.to(m.wide), rate))
