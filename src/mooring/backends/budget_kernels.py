"""The terms of a budget in generated kernels: sums over all parameters and products, the solver, and the pull."""

from collections.abc import Hashable, Iterable, Sequence

import torch
from torch import Tensor

from mooring.backends.batch_term import BatchTerm
from mooring.backends.budget_terms import DiagonalTerm, pull_rule, spent_rule
from mooring.backends.eager import removal_rule
from mooring.backends.fused import is_fusable, kernel_key
from mooring.backends.kernels.multi_tensor import Layout, MultiTensorKernel
from mooring.backends.kernels.reduce import ReduceKernel, SolverStepKernel
from mooring.rules import State
from mooring.rules.budget import MAX_NEWTON_STEPS, Budget, budget_step
from mooring.state.offload import is_offloaded

SUMS = ["spent", "slope"]
Term = DiagonalTerm | BatchTerm


class _TermGroup:
    """Terms of one kind, and the kernels for them."""

    def __init__(self, terms: Sequence[Term], budget: Budget) -> None:
        self.parameters = [term.d if isinstance(term, BatchTerm) else term.state.parameter for term in terms]
        self.batches = [term for term in terms if isinstance(term, BatchTerm)]
        tensors, dtype = _tensors(terms[0]), terms[0].state.compute_dtype
        self.layout = Layout([_tensors(term) for term in terms])
        self.reduce = ReduceKernel(spent_rule, tensors, SUMS, "mu", dtype)
        rule = removal_rule(budget) if self.batches else pull_rule(budget)
        self.pull = MultiTensorKernel(rule, tensors, [], dtype, scalar="mu")


class BudgetKernels:
    """The parameters of one budget on one GPU; the host never waits for the solution.

    Args:
        groups: terms, in groups that share kernels.
        budget: the budget.
    """

    def __init__(self, groups: Iterable[Sequence[Term]], budget: Budget) -> None:
        self.groups = [_TermGroup(terms, budget) for terms in groups]
        self.step = SolverStepKernel(budget_step, SUMS, ["nats", "mu", "done"])
        programs = [group.reduce.programs(group.layout) for group in self.groups]
        device = self.groups[0].layout.device
        self.partial_sums = torch.zeros(len(SUMS), sum(programs), dtype=torch.float64, device=device)
        self.columns = torch.split(self.partial_sums, programs, 1)

    @classmethod
    def create(cls, terms: Sequence[Term], budget: Budget) -> "BudgetKernels | None":
        """Return kernels for these terms; None if they are on several devices or cannot be addressed."""
        groups: dict[Hashable, list[Term]] = {}
        for term in terms:
            batch = isinstance(term, BatchTerm)
            if not batch and (is_offloaded(term.state) or term.state.factors):
                return None
            if not is_fusable(_tensors(term)):
                return None
            groups.setdefault((kernel_key(_tensors(term)), term.state.compute_dtype, batch), []).append(term)
        return cls(groups.values(), budget) if len({term.state.parameter.device for term in terms}) == 1 else None

    def is_valid(self) -> bool:
        """Find the parameters, and return whether they have the dtypes and strides that the kernels were made for."""
        valid = all(batch.is_valid() for group in self.groups for batch in group.batches)
        return valid and all(group.layout.follow("theta", group.parameters) for group in self.groups)

    def update_batches(self) -> None:
        """Read the parameters of batches."""
        for group in self.groups:
            for batch in group.batches:
                batch.update()

    def solve(self, nats: Tensor, mu: Tensor) -> None:
        """Set mu to the smallest mu >= 0 that keeps the budget, starting from its present value.

        Args:
            nats: the budget, 0-d and float64 on the device.
            mu: likewise; changed in place.
        """
        tables, done = [group.layout.device_table for group in self.groups], torch.zeros_like(mu)
        for _ in range(MAX_NEWTON_STEPS):
            for group, table, columns in zip(self.groups, tables, self.columns, strict=True):
                group.reduce(group.layout, table, mu, done, columns)
            self.step(self.partial_sums, {"nats": nats, "mu": mu, "done": done})

    def apply_pull(self, mu: Tensor) -> None:
        """theta <- anchor + d / (1 + mu * F); nothing where mu is 0."""
        for group in self.groups:
            for batch in group.batches:
                batch.begin_pull()
            group.pull(group.layout, {}, mu)
            for batch in group.batches:
                batch.finish_pull()


def _tensors(term: Term) -> State:
    """Return the tensors that the kernels read; a DTensor stays one, so that it is refused."""
    if isinstance(term, BatchTerm):
        return term.tensors()
    return {**term.state.pull_tensors(), "theta": term.state.parameter}
