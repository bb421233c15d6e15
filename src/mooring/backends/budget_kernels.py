"""The diagonal terms of a budget in generated kernels: sums over all parameters, the solver, and the pull."""

from collections.abc import Hashable, Iterable, Sequence

import torch
from torch import Tensor

from mooring.backends.budget_terms import pull_rule, spent_rule
from mooring.backends.fused import is_fusable, kernel_key
from mooring.backends.kernels.multi_tensor import Layout, MultiTensorKernel
from mooring.backends.kernels.reduce import ReduceKernel, SolverStepKernel
from mooring.importance import State
from mooring.pulls.budget import MAX_NEWTON_STEPS, Budget, budget_step
from mooring.state.mooring_state import ParameterState
from mooring.state.offload import is_offloaded

SUMS = ["spent", "slope"]


class _TermGroup:
    """Parameters of one kind, and the kernels for them."""

    def __init__(self, states: Sequence[ParameterState], budget: Budget) -> None:
        self.states = list(states)
        tensors, dtype = _tensors(states[0]), states[0].compute_dtype
        self.layout = Layout([_tensors(state) for state in states])
        self.reduce = ReduceKernel(spent_rule, tensors, SUMS, "mu", dtype)
        self.pull = MultiTensorKernel(pull_rule(budget), tensors, [], dtype, scalar="mu")

    def parameters(self) -> list[Tensor]:
        return [state.parameter for state in self.states]


class BudgetKernels:
    """The parameters of one budget on one GPU; the host never waits for the solution.

    Args:
        groups: states of parameters, in groups that share kernels.
        budget: the budget.
    """

    def __init__(self, groups: Iterable[Sequence[ParameterState]], budget: Budget) -> None:
        self.groups = [_TermGroup(states, budget) for states in groups]
        self.step = SolverStepKernel(budget_step, SUMS, ["nats", "mu", "done"])
        programs = [group.reduce.programs(group.layout) for group in self.groups]
        device = self.groups[0].layout.device
        self.partial_sums = torch.zeros(len(SUMS), sum(programs), dtype=torch.float64, device=device)
        self.columns = torch.split(self.partial_sums, programs, 1)

    @classmethod
    def create(cls, states: Sequence[ParameterState], budget: Budget) -> "BudgetKernels | None":
        """Return kernels for these parameters; None if they are on several devices or cannot be addressed."""
        if any(is_offloaded(state) or state.factors or not is_fusable(_tensors(state)) for state in states):
            return None
        groups: dict[Hashable, list[ParameterState]] = {}
        for state in states:
            groups.setdefault((kernel_key(_tensors(state)), state.compute_dtype), []).append(state)
        return cls(groups.values(), budget) if len({state.parameter.device for state in states}) == 1 else None

    def is_valid(self) -> bool:
        """Return whether the parameters still have the dtypes and strides that the kernels were made for."""
        return all(group.layout.matches("theta", group.parameters()) for group in self.groups)

    def solve(self, nats: Tensor, mu: Tensor) -> None:
        """Set mu to the smallest mu >= 0 that keeps the budget, starting from its present value.

        Args:
            nats: the budget, 0-d and float64 on the device.
            mu: likewise; changed in place.
        """
        for group in self.groups:
            group.layout.update("theta", group.parameters())
        tables, done = [group.layout.device_table for group in self.groups], torch.zeros_like(mu)
        for _ in range(MAX_NEWTON_STEPS):
            for group, table, columns in zip(self.groups, tables, self.columns, strict=True):
                group.reduce(group.layout, table, mu, done, columns)
            self.step(self.partial_sums, {"nats": nats, "mu": mu, "done": done})

    def apply_pull(self, mu: Tensor) -> None:
        """theta <- anchor + d / (1 + mu * F); nothing where mu is 0."""
        for group in self.groups:
            group.pull(group.layout, {}, mu)


def _tensors(state: ParameterState) -> State:
    """Return what the kernels read; the parameter itself, which is not fusable where it is a DTensor."""
    return {**state.pull_tensors(), "theta": state.parameter}
