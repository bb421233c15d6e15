"""One parameter in one step, and what a pull does to it, in pieces that stay in the cache."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mooring.coded import past
from mooring.importance import State
from mooring.ledger import Moored
from mooring.pulls import GradientPull, ParameterPull
from mooring.runs import Number
from mooring.shards import local
from mooring.tiles import tiled

__all__ = ["Due", "penalized", "pull_back"]


@dataclass
class Due:
    """A parameter that has a gradient in this step.

    Attributes:
        moored: its record.
        lr: its learning rate.
        g: the gradient of the task's loss on this rank's part, which nothing will write to until the step is over.
        factor: how many times g the optimizer is handed: -1 where it maximizes, GradScaler's scale where a fused
            kernel unscales; None is 1.
    """

    moored: Moored
    lr: Number
    g: Tensor
    factor: Number | None


def penalized(pull: GradientPull, d: Due) -> Tensor:
    """g + force, times the factor that the optimizer expects."""
    m = d.moored
    load = torch.empty_like(m.parameter)
    for piece in tiled({**m.held(), "g": d.g, "load": local(load)}):
        force = pull.force(past(piece).to(m.wide), piece["theta"].to(m.wide) - piece["anchor"], d.lr)
        if d.factor is None and force.dtype == load.dtype:
            torch.add(piece["g"], force, out=piece["load"])
        else:
            piece["load"].copy_((piece["g"] + force) * (1 if d.factor is None else d.factor))
    return load


def pull_back(pull: ParameterPull, m: Moored, lr: Number, piece: State) -> None:
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
