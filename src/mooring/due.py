"""One parameter in one step, and what a pull does to it, in pieces that stay in the cache."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mooring.importance import State
from mooring.ledger import Moored
from mooring.pulls import GradientPull, ParameterPull
from mooring.runs import Number
from mooring.shards import local
from mooring.tiles import tiles

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
    assert m.previous is not None
    load = torch.empty_like(m.parameter)
    for theta, anchor, previous, g, piece in tiles([m.theta, m.anchor, m.previous, d.g, local(load)]):
        force = pull.force(previous.to(m.wide), theta.to(m.wide) - anchor, d.lr)
        if d.factor is None and force.dtype == piece.dtype:
            torch.add(g, force, out=piece)
        else:
            piece.copy_((g + force) * (1 if d.factor is None else d.factor))
    return load


def pull_back(pull: ParameterPull, m: Moored, lr: Number, piece: State) -> None:
    """theta <- theta + rate * (anchor - theta), as a lerp, which never leaves the interval."""
    if "previous" not in piece:
        return  # nothing is known of the past
    wide = m.wide
    theta, anchor = piece["theta"], piece["anchor"].to(wide)
    rate = pull.rate(piece["previous"].to(wide), piece["current"].to(wide), lr).to(wide)
    if theta.dtype == wide:
        theta.lerp_(anchor, rate)
    else:
        theta.copy_(torch.lerp(theta.to(wide), anchor, rate))
