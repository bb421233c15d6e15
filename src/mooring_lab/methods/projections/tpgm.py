"""TPGM: each parameter is projected into a ball around its anchor, whose radius is learned on validation samples.

Tian, Dai, Ma, He, Liu, Kira: Trainable Projected Gradient Method for Robust Fine-tuning. CVPR 2023,
https://arxiv.org/abs/2303.10720.
"""

from dataclasses import dataclass
from typing import ClassVar

from mooring_lab.methods.projections.projection import RadiusProjection


@dataclass(frozen=True)
class TPGM(RadiusProjection):
    """After each optimizer's step one step on the radii, by the loss of the projected model; then the projection.

    The loss is the mean over the training batch and as many samples of past tasks: what a model is to do well on, as
    validation samples are in the paper.

    Args:
        radius_lr: the learning rate of the radii, above 0; one number, or one per run.

    Example:
        >>> TPGM(0.01).validates
        True
    """

    validates: ClassVar[bool] = True
