"""Adds the Kronecker factors of one iteration to the states; parameters without them fall back to scores."""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from mooring.curvature.observed_factors import ObservedFactors, along_directions, gradient_scales, is_explained
from mooring.distributed.dtensor import gathered, to_dtensor
from mooring.state.mooring_state import NOT_OBSERVED, MooringState
from mooring.state.parameter_state import ParameterState

NOT_EXPLAINED = "the calls of its layer do not account for its gradient: its weight is read or changed elsewhere"


def accumulate_factors(
    states: MooringState, observed: Mapping[Tensor, ObservedFactors], gradients: Mapping[Tensor, Tensor]
) -> bool:
    """Add the factors of one observed iteration, in the scale of the gradients that its step uses.

    A parameter none of whose calls was observed in this task has scores until one is. A parameter whose gradient the
    observed calls do not account for has scores from now on. That is checked in iterations 1, 2, 4, 8 and so on of a
    task, since it waits for the device.

    Args:
        states: the states of the moored parameters.
        observed: the factors of this iteration.
        gradients: the gradients that the step uses, by parameter.

    Returns:
        Whether a parameter changed from factors to scores or back.
    """
    with_factors = [state for p in gradients if (state := states.records[p]).factors]
    seen = [state for state in with_factors if state.parameter in observed]
    changed = _fall_back(states, [s for s in with_factors if s.parameter not in observed])
    for device in {state.parameter.device for state in seen}:
        on_device = [state for state in seen if state.parameter.device == device]
        changed |= _accumulate(states, on_device, observed, gradients)
    return changed


def _fall_back(states: MooringState, unseen: Collection[ParameterState]) -> bool:
    """Start scores for parameters whose layers were not observed in this task; the model may have new layers."""
    for state in unseen:
        if state.held_with and not state.unheld_reason:
            state.unheld_reason = NOT_OBSERVED
    plain = [state for state in unseen if not state.held_with]
    start = [state for state in plain if state.factors and not (state.factors.count or state.has_scores)]
    for state in start:
        state.importance_state, state.count = states.start_importance(state.parameter, states.tasks), 0
        states.diagonal_reasons[state.parameter] = NOT_OBSERVED
    if start:
        states.refresh()
    return bool(start)


def _accumulate(
    states: MooringState,
    seen: Collection[ParameterState],
    observed: Mapping[Tensor, ObservedFactors],
    gradients: Mapping[Tensor, Tensor],
) -> bool:
    passes = [observed[state.parameter] for state in seen]
    along = [_compared(state, gradients[state.parameter], o) for state, o in zip(seen, passes, strict=True)]
    scales, checks, changed = gradient_scales(passes, along), [], False
    for state, own, gradient, scale in zip(seen, passes, along, scales, strict=True):
        assert state.factors is not None
        if state.has_scores:  # from iterations in which it was not observed
            state.importance_state, changed = states.no_scores(state.parameter), True
            states.diagonal_reasons.pop(state.parameter, None)
        inputs, outputs = own.inputs, own.outputs * scale
        state.factors.accumulate(*((outputs, inputs) if own.transposed else (inputs, outputs)))
        state.factors.count += 1
        if state.factors.count & (state.factors.count - 1) == 0 and not state.held_with:  # dropout is not explained
            checks.append((state, is_explained(own, gradient, scale)))
    explained = torch.stack([check for _, check in checks]).tolist() if checks else []
    for (state, _), ok in zip(checks, explained, strict=True):
        if not ok:
            states.to_scores(state)
            states.diagonal_reasons[state.parameter] = NOT_EXPLAINED
            changed = True
    return changed


def _compared(state: ParameterState, g: Tensor, observed: ObservedFactors) -> Tensor:
    """Return the gradient that a step uses in the form of `ObservedFactors.gradient`; that of a B is whole."""
    dtype = observed.gradient.dtype
    if state.held_with:
        return gathered(to_dtensor(g, state.parameter)).flatten(1).to(dtype)
    return along_directions(g, dtype, transposed=observed.transposed)
