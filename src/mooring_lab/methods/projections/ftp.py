"""FTP: each parameter is projected into a ball around its anchor, whose radius is learned from the training gradients.

Tian, Liu, Smith, Kira: Fast Trainable Projection for Robust Fine-Tuning. NeurIPS 2023, https://arxiv.org/abs/2310.19182.
"""

from dataclasses import dataclass
from typing import ClassVar

from mooring_lab.methods.projections.projection import RadiusProjection


@dataclass(frozen=True)
class FTP(RadiusProjection):
    """Before each optimizer's step one step on the radii, by the gradient of the batch at the projected weights.

    The gradient is that of the training step, so that nothing is computed twice and no other sample is needed. It is of
    a batch that the projected weights were not trained on. The paper's annealing of positive gradients is not used: its
    kappa is 1.

    Args:
        radius_lr: the learning rate of the radii, above 0; one number, or one per run.

    Example:
        >>> FTP(0.01).validates
        False
    """

    validates: ClassVar[bool] = False
