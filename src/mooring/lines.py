"""What holds many parameters at once, on a GPU: the sums of a budget, its multiplier and its pull, in kernels."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mooring.coded import past
from mooring.fused import fits, likeness
from mooring.kernels.solving import Step, Sums
from mooring.kernels.table import Layout, Table
from mooring.ledger import Moored
from mooring.pulls.budget import MOST, Budget, budget_step, spent_each
from mooring.staging import far

__all__ = ["Lines"]

State = dict[str, Tensor]


def _spent(told: State) -> None:
    spent, slope = spent_each(past(told), told["theta"] - told["anchor"], told["mu"])
    told["spent"].copy_(spent)
    told["slope"].copy_(slope)


class Lines:
    """The parameters of one budget, all alike, each held weight by weight.

    Args:
        records: of the parameters.
        budget: says how far back a parameter goes.
    """

    def __init__(self, records: Sequence[Moored], budget: Budget) -> None:
        def pulled(told: State) -> None:
            told["theta"].lerp_(told["anchor"], budget.rate(past(told), told["mu"]))

        self.records = list(records)
        tensors, wide = tensors_of(self.records[0]), self.records[0].wide
        self.layout = Layout([tensors_of(m) for m in self.records])
        self.sums = Sums(_spent, tensors, ["spent", "slope"], "mu", wide)
        self.step = Step(budget_step, ["spent", "slope"], ["nats", "mu", "done"])
        self.pull = Table(pulled, tensors, [], wide, dial="mu")
        self.partial = self.sums.room(self.layout)

    @classmethod
    def of(cls, records: Sequence[Moored], budget: Budget) -> "Lines | None":
        """The lines of these parameters; None where they are not alike, or not where kernels reach them."""
        if any(far(m) for m in records):
            return None
        alike = {(likeness(tensors_of(m)), m.wide) for m in records}
        if len(alike) > 1 or not all(m.factor is None and fits(tensors_of(m)) for m in records):
            return None
        return cls(records, budget)

    def solve(self, nats: Tensor, mu: Tensor) -> None:
        """The smallest mu >= 0 that keeps the budget, in place, from where it is.

        Args:
            nats: the budget, 0-d and float64 on the device.
            mu: the same kind; changed.
        """
        self.layout.move("theta", [m.parameter for m in self.records])
        table, done = self.layout.sent(), torch.zeros_like(mu)
        for _ in range(MOST):
            self.sums(self.layout, table, mu, done, self.partial)
            self.step(self.partial, {"nats": nats, "mu": mu, "done": done})

    def pull_back(self, mu: Tensor) -> None:
        """theta <- anchor + d / (1 + mu * F); nothing where mu is 0."""
        self.pull(self.layout, {}, mu)


def tensors_of(m: Moored) -> State:
    """What a line reads of a parameter."""
    return {**m.held(), "theta": m.parameter}
