"""Small parameters with a curvature for each weight as one term of a budget, on a CPU.

A network has hundreds of biases and norms. Their sums and pulls are dozens of operations each, whose calls take longer
than their work. On a GPU one generated kernel does all parameters (`mooring.backends.budget_kernels`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mooring.backends.batch_term import BudgetTerm
from mooring.rules.budget import Budget, spent_at
from mooring.rules.pull import Number
from mooring.state import offload
from mooring.state.parameter_state import ParameterState

MAX_SIZE = 1 << 14
"""Weights of a small parameter; larger ones take longer than their calls, and their importance is not copied."""


class SmallBatch(BudgetTerm):
    """Small parameters as one term of a budget, with their importances one after the other in a vector.

    Args:
        states: states that `is_small`, of one dtype.

    Attributes:
        d: the displacements, (weights,).
        previous: the importance over past tasks, (weights,).
    """

    def __init__(self, states: Sequence[ParameterState]) -> None:
        self.states, self.state = list(states), states[0]
        self._kept = [_previous(state) for state in states]
        self.previous = torch.cat([scores.reshape(-1).to(states[0].compute_dtype) for scores in self._kept])
        self.update()

    def is_valid(self) -> bool:
        """Return whether the parameters still have the importances and dtypes that the batch was made for."""
        kept = zip(self.states, self._kept, strict=True)
        return all(state.previous is scores and is_small(state) for state, scores in kept)

    def update(self) -> None:
        """Read the parameters: compute their displacements."""
        thetas, anchors = ([getattr(s, name) for s in self.states] for name in ("theta", "anchor"))
        self.d = torch.cat([d.view(-1) for d in torch._foreach_sub(thetas, anchors)])

    def spent(self, mu: Number) -> Tensor:
        """Return `spent_at` of all parameters, (2,)."""
        return spent_at(self.previous, self.d, mu)

    def apply_pull(self, budget: Budget, mu: Tensor) -> None:
        """theta <- theta + rate * (anchor - theta), as `mooring.backends.eager.apply_pull` does."""
        thetas = [state.theta for state in self.states]
        rates = torch.split(budget.rate(self.previous, mu.to(self.previous.dtype)), [t.numel() for t in thetas])
        shaped = [rate.view(t.shape) for rate, t in zip(rates, thetas, strict=True)]
        torch._foreach_lerp_(thetas, [state.anchor for state in self.states], shaped)


def _previous(state: ParameterState) -> Tensor:
    assert isinstance(state.previous, Tensor)
    return state.previous


def is_small(state: ParameterState) -> bool:
    """Return whether a parameter can be in a batch: plain and small, on a CPU, with a score for each weight."""
    theta, previous = state.parameter, state.previous
    if state.runs or state.factors or theta.device.type != "cpu" or type(theta) not in (nn.Parameter, Tensor):
        return False
    if not isinstance(previous, Tensor) or previous.shape != theta.shape or offload.is_offloaded(state):
        return False
    plain = theta.is_contiguous() and state.anchor.is_contiguous() and theta.dtype == state.anchor.dtype
    return plain and 0 < theta.numel() <= MAX_SIZE and theta.dtype == state.compute_dtype


def small_batches(states: Sequence[ParameterState]) -> list[SmallBatch]:
    """Return batches of states that `is_small`, one for each dtype."""
    by_dtype: dict[torch.dtype, list[ParameterState]] = {}
    for state in states:
        by_dtype.setdefault(state.compute_dtype, []).append(state)
    return [SmallBatch(members) for members in by_dtype.values()]
