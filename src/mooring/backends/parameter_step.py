"""One parameter in one step, and what a pull does to it, in pieces that stay in the cache."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mooring.importance import State
from mooring.pulls import ParameterPull
from mooring.pulls.run_axis import Number
from mooring.state.mooring_state import ParameterState
from mooring.state.quantization import past

__all__ = ["ParameterStep", "now_of", "pull_back"]


@dataclass(slots=True)
class ParameterStep:
    """A parameter that has a gradient in this step.

    Attributes:
        moored: its record.
        lr: its learning rate.
        g: the gradient of the task's loss on this rank's part, which nothing will write to until the step is over.
        factor: how many times g the optimizer is handed: -1 where it maximizes, GradScaler's scale where a fused
            kernel unscales; None is 1.
        counts: whether this step says anything about its importance.
    """

    moored: ParameterState
    lr: Number
    g: Tensor
    factor: Number | None
    counts: bool = True


def now_of(name: str, due: Sequence[ParameterStep]) -> Sequence[Tensor | Number]:
    """theta, anchor, g, lr, factor or count of many parameters: what a kernel is told in every step."""
    if name == "theta":
        return [d.moored.theta for d in due]
    if name == "anchor":
        return [d.moored.near for d in due]
    if name == "g":
        return [d.g for d in due]
    if name == "lr":
        return [d.lr for d in due]
    if name == "factor":
        return [1.0 if d.factor is None else d.factor for d in due]
    assert name == "count"
    return [d.moored.count for d in due]


def pull_back(pull: ParameterPull, m: ParameterState, lr: Number, piece: State) -> None:
    """theta <- theta + rate * (anchor - theta), as a lerp, which never leaves the interval."""
    if "previous" not in piece:
        return  # nothing is known of the past
    wide = m.wide
    theta, anchor = piece["theta"], piece["anchor"].to(wide)
    previous = past(piece).to(wide)
    rate = pull.rate(previous, piece.get("current", previous).to(wide), lr).to(wide)  # not kept: not read
    if theta.dtype == wide:
        theta.lerp_(anchor, rate)
    else:
        theta.copy_(torch.lerp(theta.to(wide), anchor, rate))
