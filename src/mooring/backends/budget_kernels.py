"""What holds many parameters at once, on a GPU: the sums of a budget, its multiplier and its pull, in kernels."""

from collections.abc import Hashable, Iterable, Sequence

import torch
from torch import Tensor

from mooring.backends.fused import fits, likeness
from mooring.backends.kernels.multi_tensor import Layout, MultiTensorKernel
from mooring.backends.kernels.reduce import Step, Sums
from mooring.pulls.budget import MAX_NEWTON_STEPS, Budget, budget_step, spent_each
from mooring.state.mooring_state import ParameterState
from mooring.state.offload import is_offloaded
from mooring.state.quantization import past

__all__ = ["BudgetKernels"]

State = dict[str, Tensor]

SUMS = ["spent", "slope"]
"""Over all parameters."""


def _spent(told: State) -> None:
    spent, slope = spent_each(past(told), told["theta"] - told["anchor"], told["mu"])
    told["spent"].copy_(spent)
    told["slope"].copy_(slope)


class _Alike:
    """Parameters of a budget that are alike, and the kernels for them."""

    def __init__(self, records: Sequence[ParameterState], budget: Budget) -> None:
        def pulled(told: State) -> None:
            told["theta"].lerp_(told["anchor"], budget.rate(past(told), told["mu"]))

        self.records = list(records)
        tensors, wide = tensors_of(self.records[0]), self.records[0].wide
        self.layout = Layout([tensors_of(m) for m in self.records])
        self.sums = Sums(_spent, tensors, SUMS, "mu", wide)
        self.pull = MultiTensorKernel(pulled, tensors, [], wide, dial="mu")


class BudgetKernels:
    """The parameters of one budget, each held weight by weight: those that are alike by the same kernels.

    Args:
        alike: groups of records of the parameters.
        budget: says how far back a parameter goes.
    """

    def __init__(self, alike: Iterable[Sequence[ParameterState]], budget: Budget) -> None:
        self.alike = [_Alike(records, budget) for records in alike]
        self.step = Step(budget_step, SUMS, ["nats", "mu", "done"])
        programs = [each.sums.programs(each.layout) for each in self.alike]
        device = self.alike[0].layout.device
        self.partial = torch.zeros(len(SUMS), sum(programs), dtype=torch.float64, device=device)
        self.columns = torch.split(self.partial, programs, 1)

    @classmethod
    def of(cls, records: Sequence[ParameterState], budget: Budget) -> "BudgetKernels | None":
        """The lines of these parameters; None where they are on several devices, or kernels do not reach them."""
        if any(is_offloaded(m) or m.factor or not fits(tensors_of(m)) for m in records):
            return None
        alike: dict[Hashable, list[ParameterState]] = {}
        for m in records:
            alike.setdefault((likeness(tensors_of(m)), m.wide), []).append(m)
        return cls(alike.values(), budget) if len({m.parameter.device for m in records}) == 1 else None

    def still(self) -> bool:
        """Whether the parameters have the form that the kernels were made for."""
        return all(each.layout.is_for("theta", [m.parameter for m in each.records]) for each in self.alike)

    def solve(self, nats: Tensor, mu: Tensor) -> None:
        """The smallest mu >= 0 that keeps the budget, in place, from where it is.

        Args:
            nats: the budget, 0-d and float64 on the device.
            mu: the same kind; changed.
        """
        for each in self.alike:
            each.layout.move("theta", [m.parameter for m in each.records])
        tables, done = [each.layout.sent for each in self.alike], torch.zeros_like(mu)
        for _ in range(MAX_NEWTON_STEPS):
            for each, table, columns in zip(self.alike, tables, self.columns, strict=True):
                each.sums(each.layout, table, mu, done, columns)
            self.step(self.partial, {"nats": nats, "mu": mu, "done": done})

    def pull_back(self, mu: Tensor) -> None:
        """theta <- anchor + d / (1 + mu * F); nothing where mu is 0."""
        for each in self.alike:
            each.pull(each.layout, {}, mu)


def tensors_of(m: ParameterState) -> State:
    """What a line reads of a parameter."""
    return {**m.held(), "theta": m.parameter}
