"""The return of runs towards their anchors at the end of a task, until each keeps its measured budget.

The paths are those of `mooring.hold.measured_budget.MeasuredBudget.finish`; every run has its own place on them.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from mooring.hold.measured_budget import BISECTIONS, STRONGEST_PULL
from mooring.rules import Budget
from mooring.rules.pull import per_run
from mooring_lab.fleet.method_state import MethodState, Tensors

Path = Callable[[Tensor, Tensor], None]
"""Takes places from 0 to 1, of shape (runs,), and which runs to move there, bool of shape (runs,)."""


def return_to_budget(state: MethodState, named: Tensor, measure: Callable[[], Tensor]) -> Tensor:
    """Move runs that exceed their budget towards their anchors, as little as is needed.

    The budget's own pull goes first. Runs that no pull brings back are interpolated with the anchor.

    Args:
        state: of the runs; their parameters are changed in place.
        named: the budget of each run, float64 of shape (runs,).
        measure: returns what is measured now, float64 of shape (runs,).

    Returns:
        Which runs keep their budget nowhere, and stay where they were; bool of shape (runs,).
    """
    over = ~(measure() <= named)
    if not bool(over.any()):
        return over
    ends = {name: parameter.theta.clone() for name, parameter in state.states.items()}
    assert state.scale is not None
    scale = state.scale.clone()
    over = over & ~_go_to_last_kept(_pull_path(state, ends), over & _has_pull(state), named, measure)
    state.scale.copy_(scale)  # that of training, from which the next task starts
    over = over & ~_go_to_last_kept(_straight_path(state, ends), over, named, measure)
    _move(state, ends, over)
    return over


def _go_to_last_kept(path: Path, runs: Tensor, named: Tensor, measure: Callable[[], Tensor]) -> Tensor:
    """Go to the farthest place of a path that keeps the budget, and return the runs that have one."""
    low, high = torch.zeros_like(named), torch.ones_like(named)
    if bool(runs.any()):
        path(low, runs)
        runs = runs & (measure() <= named)
    if not bool(runs.any()):
        return runs
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        path(middle, runs)
        kept = measure() <= named
        low, high = torch.where(kept, middle, low), torch.where(kept, high, middle)
    path(low, runs)
    while bool((over := runs & ~(measure() <= named)).any()):  # by rounding
        low = torch.where(over, torch.where(low > 1e-3, 0.98 * low, 0.0), low)
        path(low, runs)
    return runs


def _has_pull(state: MethodState) -> Tensor:
    """Return which runs have spent something that a pull could give back."""
    energy = state.spent()
    return (energy > 0) & energy.isfinite() & (_allowed(state) > 0)


def _pull_path(state: MethodState, ends: Tensors) -> Path:
    """Return the path along which the budget's pull gets stronger."""
    start, scales = state.mu.clone(), state.spent() / _allowed(state)

    def path(t: Tensor, runs: Tensor) -> None:
        others, mu = {name: parameter.theta.clone() for name, parameter in state.states.items()}, state.mu.clone()
        assert state.scale is not None
        state.scale.copy_(STRONGEST_PULL ** (1 - t) * scales)
        state.mu.copy_(start)  # the search depends on where it starts
        _move(state, ends, runs)
        state.apply_pull(list(state.states))
        _move(state, others, ~runs)
        state.mu.copy_(torch.where(runs, state.mu, mu))

    return path


def _straight_path(state: MethodState, ends: Tensors) -> Path:
    def path(t: Tensor, runs: Tensor) -> None:
        places = {}
        for name, parameter in state.states.items():
            anchor = parameter.anchor
            share = torch.as_tensor(per_run(t.to(anchor.dtype), anchor))
            places[name] = torch.where(share == 0, anchor, anchor.lerp(ends[name], share))
        _move(state, places, runs)

    return path


def _move(state: MethodState, places: Tensors, runs: Tensor) -> None:
    """Set the parameters of these runs."""
    for name, parameter in state.states.items():
        own = torch.as_tensor(per_run(runs, parameter.theta))
        parameter.theta.copy_(torch.where(own, places[name], parameter.theta))


def _allowed(state: MethodState) -> Tensor:
    assert isinstance(state.pull, Budget)
    return torch.as_tensor(state.pull.allowed(state.tasks)).double().to(state.mu.device)
