"""Penalty: the quadratic regularizer, as a force on the gradient."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mooring.rules.pull import GradientPull, Number, check_numbers, per_run


def penalty_loss(previous: Tensor, d: Tensor, strength: Number) -> Tensor:
    """Return what the penalty adds to the loss, strength / 2 * previous * d^2 of each weight; equation 1 is its sum.

    Training does not compute it: `penalty_force` is its gradient.

    Example:
        >>> penalty_loss(torch.tensor([1.0, 50.0]), torch.tensor([2.0, 2.0]), strength=10.0)
        tensor([  20., 1000.])
    """
    return per_run(strength, d) / 2 * previous * d.square()


def penalty_force(previous: Tensor, d: Tensor, strength: Number, lr: Number, clamp: bool = False) -> Tensor:
    """Compute the penalty's gradient, strength * previous * d, with previous capped at 1 / (lr * strength) if clamped.

    Args:
        previous: the importance over past tasks, (...) or (runs, ...).
        d: theta - anchor, of the same shape.
        strength: the factor of the penalty; one number, or one per run.
        lr: the learning rate that the cap depends on; one number, or one per run.
        clamp: whether to cap.

    Example:
        >>> p, d = torch.tensor([1.0, 50.0]), torch.tensor([2.0, 2.0])
        >>> penalty_force(p, d, strength=10.0, lr=0.01)
        tensor([  20., 1000.])
        >>> penalty_force(p, d, strength=10.0, lr=0.01, clamp=True)
        tensor([ 20., 200.])
    """
    strength, lr = per_run(strength, d), per_run(lr, d)
    if clamp:
        p = lr * strength  # at importance 1; a plain number stays on the host, which avoids a synchronisation
        if isinstance(p, Tensor):
            previous = torch.minimum(previous, p.reciprocal().to(previous))
        else:
            previous = previous.clamp(max=1 / p if p else torch.inf)
    return (previous * d).mul_(strength)


@dataclass(frozen=True)
class Penalty(GradientPull):
    """g <- g + strength * previous * d: the gradient of strength/2 * sum(previous * d^2), added analytically.

    It interpolates only while lr * strength * previous is below 1; check with `Mooring.diagnose`.

    Args:
        strength: the factor of the penalty; one number, or one per run.
        clamp: cap importance at 1 / (lr * strength), above which the penalty extrapolates.

    Example:
        >>> Penalty(strength=100.0).force(torch.tensor([0.5]), torch.tensor([0.1]), lr=0.01)
        tensor([5.])
    """

    strength: Number
    clamp: bool = False

    def __post_init__(self) -> None:
        check_numbers("strength", self.strength, 0)

    @property
    def reads_lr(self) -> bool:
        """True with a clamp."""
        return self.clamp

    def force(self, previous: Tensor, d: Tensor, lr: Number) -> Tensor:
        """Return `penalty_force` at this strength."""
        return penalty_force(previous, d, self.strength, lr, self.clamp)
