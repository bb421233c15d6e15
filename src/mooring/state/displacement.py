"""The parameters that are not at their anchors where a task begins: somebody replaced the weights."""

from collections.abc import Iterable

import torch
from torch import Tensor

from mooring.state.parameter_state import ParameterState

MAX_ROUNDING = 0.01
"""Weights further from their anchors than this part of the anchors' norm are other weights, not rounded ones."""


def displaced(states: Iterable[ParameterState]) -> list[str]:
    """Return the names of parameters that are further from their anchors than rounding brings them.

    Example:
        >>> weight = torch.tensor([3.0, 4.0])
        >>> anchors = {"near": weight + 0.01, "far": weight + 1}
        >>> displaced(ParameterState(name, weight, anchor, {}) for name, anchor in anchors.items())
        ['far']
    """
    known = [state for state in states if not state.theta.is_meta]
    far = is_true([_is_far(state) for state in known])
    return [state.name for state, moved in zip(known, far, strict=True) if moved]


def is_true(flags: list[Tensor]) -> list[bool]:
    """Return the values of single-element tensors, with one synchronisation for each device.

    Example:
        >>> is_true([torch.tensor(True), torch.tensor(0.0)])
        [True, False]
    """
    values = [False] * len(flags)
    for device in {flag.device for flag in flags}:
        places = [index for index, flag in enumerate(flags) if flag.device == device]
        for index, value in zip(places, torch.stack([flags[index].bool() for index in places]).tolist(), strict=True):
            values[index] = value
    return values


def _is_far(state: ParameterState) -> Tensor:
    theta, anchor = state.theta.float(), state.device_anchor.float()
    tolerance = max(MAX_ROUNDING, torch.finfo(state.anchor.dtype).eps)
    return torch.gt((theta - anchor).norm(), tolerance * anchor.norm())
