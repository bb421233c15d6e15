"""Variants of `owm` and `budget-kronecker` that separate why the two differ, for `mooring frontier --methods`.

In the folder `benchmarks`:

    mooring frontier --stream digits-rotated --tasks 5 --network mlp --lr 0.03 --epochs 10 --batch 20 --seeds 5 \
        --methods projection_variants:CUT,projection_variants:SAMPLED,projection_variants:EVERY_STEP
"""

from dataclasses import dataclass

import torch
from torch import Tensor

import mooring
from mooring.rules.pull import per_run
from mooring_lab.methods.projections import GradientProjectionOptions
from mooring_lab.methods.projections.owm import OWM
from mooring_lab.methods.projections.projection import State
from mooring_lab.model.method import Method


@dataclass(frozen=True)
class CutOWM(OWM):
    """OWM with a cut: a direction is free if the mean square of past inputs along it is below alpha, or fixed.

    Example:
        >>> moment = torch.diag(torch.tensor([0.5, 3.0], dtype=torch.float64))
        >>> CutOWM(alpha=1.0).update({}, moment, 1)["projection"].diagonal()
        tensor([1., 0.], dtype=torch.float64)
    """

    def update(self, state: State, moment: Tensor, count: int) -> State:
        """Return second moment and projection after a task; see `InputProjection.update`."""
        total = moment / count + state["moment"] if state else moment / count
        alpha = self.alpha.to(total) if isinstance(self.alpha, Tensor) else self.alpha
        values, vectors = torch.linalg.eigh(total)
        free = (values < per_run(alpha, values)).to(total)
        return {"moment": total, "projection": vectors * free.unsqueeze(-2) @ vectors.mT}


@dataclass(frozen=True)
class SampledOWM(OWM):
    """OWM that looks at 300 samples of a task, as GPM does."""

    samples = 300


def layer_curvature(seed: int) -> mooring.Kronecker:
    """Return Kronecker factors that are observed in every step instead of every fourth."""
    return mooring.Kronecker(every=1)


CUT = Method(
    "cut-owm",
    "owm with a cut",
    strength=0.1,
    dial=(0.01, 0.1, 1.0),
    plugin=GradientProjectionOptions(projection=CutOWM),
)
SAMPLED = Method(
    "sampled-owm",
    "owm with 300 samples",
    strength=0.01,
    dial=(0.001, 0.01, 0.1),
    plugin=GradientProjectionOptions(projection=SampledOWM),
)
EVERY_STEP = Method(
    "budget-kronecker-every-step",
    "budget-kronecker whose factors are observed in every step",
    layer_curvature,
    lambda nats: mooring.Budget(nats),
    0.001,
    merge="sum",
    dial=(0.0003, 0.001, 0.003),
)
