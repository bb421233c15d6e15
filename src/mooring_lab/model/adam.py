"""Adam's running means, in one place for the optimizer of fleets and for learned radii."""

from torch import Tensor

from mooring.rules.pull import Number

SECOND_BETA = 0.999
EPSILON = 1e-8
"""Adam's numbers, as torch has them by default."""


def adam_moments(
    mean: Tensor, square: Tensor, g: Tensor, beta: Number, mean_correction: Number, square_correction: Number
) -> tuple[Tensor, Tensor]:
    """Update the running means of g and g^2 in place; return the corrected mean, and sqrt(square) + 1e-8.

    Args:
        mean: of g; it starts at 0.
        square: of g^2; it starts at 0.
        g: the gradient.
        beta: the share of `mean` that stays; of `square` it is 0.999.
        mean_correction: 1 - beta^steps with the present step.
        square_correction: 1 - 0.999^steps.

    Example:
        >>> import torch
        >>> mean, spread = adam_moments(*torch.zeros(2, 1), torch.tensor([3.0]), 0.9, 1 - 0.9, 1 - 0.999)
        >>> (mean / spread).round(decimals=4)
        tensor([1.])
    """
    mean.mul_(beta)
    if isinstance(beta, Tensor):
        mean.add_((1 - beta) * g)
    else:
        mean.add_(g, alpha=1 - beta)
    square.mul_(SECOND_BETA).add_(g.square(), alpha=1 - SECOND_BETA)
    return mean / mean_correction, (square / square_correction).sqrt() + EPSILON
