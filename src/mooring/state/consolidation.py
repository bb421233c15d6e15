"""The end of a task, the last line of Algorithm 1: `consolidate`, for one model and for a fleet of runs alike."""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from mooring.curvature.kronecker_factors import KroneckerFactors, update_eigenbases
from mooring.distributed.dtensor import reduce_over_shards
from mooring.errors import MooringError
from mooring.rules import Importance, State
from mooring.rules.merges import Merge
from mooring.rules.pull import per_run
from mooring.state.memory import Memory
from mooring.state.parameter_state import ParameterState
from mooring.state.quantization import QuantizedImportance
from mooring.state.selection import layer_of


def layer_scales(states: Iterable[ParameterState], importance: Importance) -> State:
    """Return a factor for the scores of each layer, and of each run; empty unless the importance balances layers."""
    scored = [state for state in states if state.importance_state]
    if not importance.balances or not scored:
        return {}
    sums: dict[str, Tensor] = {}
    sizes: dict[str, int] = {}
    totals = []
    for state in scored:
        scores = state.full(state.importance_state["current"]).abs()
        if state.outputs is not None:
            scores = scores[:, : state.outputs]
        totals.append(scores.reshape(len(scores), -1).sum(1) if state.runs else scores.sum(dtype=state.compute_dtype))
    for state, total in zip(scored, reduce_over_shards(totals, [s.parameter for s in scored]), strict=True):
        layer = layer_of(state.name)
        sums[layer] = sums[layer] + total if layer in sums else total
        in_use = 1 if state.outputs is None else state.outputs / state.anchor.shape[1]
        sizes[layer] = sizes.get(layer, 0) + round(in_use * state.size)
    return dict(zip(sums, importance.factors(list(sums.values()), list(sizes.values())), strict=True))


def consolidate(
    states: Collection[ParameterState],
    importance: Importance,
    merge: Merge,
    memory: Memory,
    start: Callable[[ParameterState, int], State],
    tasks: int,
    pull: Callable[[], None] = lambda: None,
    decompose: bool = True,
) -> None:
    """End a task: previous <- merge(previous, current); anchor <- theta; `current` is reset.

    Args:
        states: the states of all moored parameters.
        importance: the importance of the task.
        merge: the rule (previous, current) -> previous.
        memory: the form in which `previous` is kept.
        start: returns the importance's tensors of a parameter at the start of a task, counted from 0.
        tasks: the number of tasks consolidated before this one.
        pull: applies a pull that acts once per task. Whatever can fail comes before it, so that an error changes
            nothing.
        decompose: whether to compute the eigenbases of Kronecker factors now; otherwise when something reads them.
    """
    scales, ended = layer_scales(states, importance), []
    for state in states:
        previous, factors, importance_state = state.previous, None, state.importance_state
        if state.is_product_input:
            previous = None
        elif state.factors and not (state.has_scores and state.count):
            with _name_factors(state.name):
                factors = state.factors.consolidated()
        else:
            importance_state = start(state, tasks + 1) if memory.accumulates else {}
            carried = importance_state.keys() & state.importance_state.keys() & {*importance.carries}
            importance_state |= {slot: state.importance_state[slot] for slot in carried}
            if state.count or not importance.merges:  # a parameter without a gradient keeps its importance
                if state.importance_state:
                    importance.end_task(state.importance_state, state.displacement)
                score = (state.importance_state or start(state, tasks))["current"].to(state.compute_dtype)
                if (scale := scales.get(layer_of(state.name))) is not None:
                    score = score * per_run(scale, score)
                if importance.merges:
                    score = merge(_past_scores(state, score), score)
                previous = memory.store_previous(score, state.theta)
        ended.append((previous, factors, importance_state))
    if decompose:
        _compute_bases({s.name: new for s, (_, new, _) in zip(states, ended, strict=True) if new and new.basis is None})
    pull()
    for state, (previous, factors, importance_state) in zip(states, ended, strict=True):
        state.previous, state.factors, state.importance_state = previous, factors, importance_state
        state.count = 0
    move_anchors(states)


def _past_scores(state: ParameterState, like: Tensor) -> Tensor:
    """Return the importance over past tasks in the dtype to compute in; 0 before the first consolidation."""
    previous = state.previous.values() if isinstance(state.previous, QuantizedImportance) else state.previous
    if state.factors and state.factors.tasks:
        previous = state.factors.past_diagonal(state.theta)
    return torch.zeros_like(like) if previous is None else previous.to(state.compute_dtype)


def move_anchors(states: Iterable[ParameterState]) -> None:
    """anchor <- theta."""
    for state in states:
        state.anchor.copy_(state.theta)


def _compute_bases(factors: dict[str, KroneckerFactors]) -> None:
    """Compute the eigenbases of factors, which are new, by name; the first that has none is named."""
    try:
        update_eigenbases(factors.values())
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        for name, own in factors.items():
            with _name_factors(name):
                own.update_eigenbasis()


@contextmanager
def _name_factors(name: str) -> Iterator[None]:
    """Turn the error of a solver into one that names the parameter."""
    try:
        yield
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
        raise MooringError(
            f"the Kronecker factors of {name!r} have no eigenvectors, and nothing was changed: they may not be finite; "
            "keep check_finite=True, and skip batches before their step"
        ) from error
