"""Many parameters as one term of a budget, with their displacements and curvatures in two long vectors."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mooring.backends.eager import chunks, removal_rule, run_in_chunks
from mooring.rules import State
from mooring.rules.budget import Budget, spent_at
from mooring.rules.pull import Number, ParameterPull
from mooring.state.parameter_state import ParameterState


class BudgetTerm(ABC):
    """What a budget is spent on: one parameter, or many at once.

    Attributes:
        state: the state of the parameter, or of the first one.
    """

    state: ParameterState

    @property
    def placed_like(self) -> Tensor:
        """A tensor whose placements say over which shards to add up what is spent."""
        return self.state.parameter

    @abstractmethod
    def spent(self, mu: Number) -> Tensor:
        """Return `spent_at` of all parameters, (2,) or (2, runs)."""

    def energy(self) -> Tensor:
        """Return what the parameters spend without a pull."""
        return self.spent(0.0)[0]

    @abstractmethod
    def apply_pull(self, budget: Budget, mu: Tensor) -> None:
        """theta <- anchor + d / (1 + mu * F), in coordinates in which F is diagonal."""


class BatchTerm(BudgetTerm):
    """Many parameters as one term, in coordinates in which their curvature is diagonal.

    Args:
        states: the states of the parameters, on one device and of one dtype to compute in.
        size: the number of coordinates.
        dtype: the dtype in which coordinates are stored; by default the one to compute in.

    Attributes:
        d: the displacements, (size,).
        curvature: the curvature along each of them, (size,).
        removed: what the pull removes of each, (size,).
    """

    def __init__(self, states: Sequence[ParameterState], size: int, dtype: torch.dtype | None = None) -> None:
        self.states, self.state = list(states), states[0]
        dtype, device = dtype or self.state.compute_dtype, self.state.parameter.device
        self.d, self.curvature, self.removed = (torch.zeros(size, dtype=dtype, device=device) for _ in range(3))
        self.zero = self.d.new_zeros(())

    @abstractmethod
    def is_valid(self) -> bool:
        """Return whether the parameters still are what the batch was made for."""

    @abstractmethod
    def update(self) -> None:
        """Read the parameters: compute their displacements."""

    @abstractmethod
    def finish_pull(self) -> None:
        """Subtract from the parameters what the pull removes."""

    def begin_pull(self) -> None:
        """Set what is removed to 0, before the rule of a removal runs on `tensors`."""
        self.removed.zero_()

    def tensors(self) -> State:
        """Return what `spent_rule` and `removal_rule` read and write; their addresses stay."""
        return {"theta": self.d, "anchor": self.zero, "previous": self.curvature, "removed": self.removed}

    def spent(self, mu: Number) -> Tensor:
        """Return `spent_at` of all parameters, (2,)."""
        parts, dtype = chunks({"theta": self.d, "previous": self.curvature}), self.state.compute_dtype
        spent = [spent_at(part["previous"].to(dtype), part["theta"].to(dtype), mu) for part in parts]
        return torch.stack(spent).sum(0)

    def apply_pull(self, budget: Budget, mu: Tensor) -> None:
        """theta <- anchor + d / (1 + mu * F), in the eigenbases."""
        self.pull_back(budget, {"mu": mu.to(self.state.compute_dtype)}, {})

    def pull_back(self, pull: ParameterPull | Budget, numbers: Mapping[str, Number], tensors: State) -> None:
        """Pull the displacements towards 0.

        Args:
            pull: the pull.
            numbers: the numbers that it reads.
            tensors: further tensors that it reads, of the size of d.
        """
        self.begin_pull()
        run_in_chunks(removal_rule(pull), {**self.tensors(), **tensors}, numbers, self.state.compute_dtype)
        self.finish_pull()
