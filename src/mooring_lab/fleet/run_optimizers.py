"""The optimizers that a fleet can train with, by the name that a run's specification gives."""

from collections.abc import Sequence

from torch import Tensor

from mooring_lab.fleet.adamw import AdamW
from mooring_lab.fleet.fleet_optimizer import FleetOptimizer
from mooring_lab.fleet.sgd import SGD
from mooring_lab.model.spec import RunSpec

FLEET_OPTIMIZERS: dict[str, type[FleetOptimizer]] = {"sgd": SGD, "adamw": AdamW}


def make_optimizer(specs: Sequence[RunSpec], like: Tensor) -> FleetOptimizer:
    """Return the optimizer of runs that name the same one, with the dtype and device of a tensor.

    Example:
        >>> import torch
        >>> specs = [RunSpec("digits", "0", "plain", 0, lr=0.1, momentum=momentum) for momentum in (0.0, 0.5)]
        >>> sgd = make_optimizer(specs, torch.zeros(()))
        >>> sgd.lr, sgd.momentum, sgd.weight_decay
        (tensor([0.1000, 0.1000]), tensor([0.0000, 0.5000]), 0.0)
    """
    return FLEET_OPTIMIZERS[specs[0].optimizer].of(specs, like)
