"""OWM: orthogonal weights modification, a regularized projection away from all past inputs.

Zeng, Chen, Cui, Yu: Continual learning of context-dependent processing in neural networks. Nature Machine Intelligence
2019, https://arxiv.org/abs/1810.01256.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mooring.rules.pull import Number, check_numbers, per_run
from mooring_lab.methods.projections.projection import InputProjection, State


@dataclass(frozen=True)
class OWM(InputProjection):
    """P = I - A (A'A + alpha I)^-1 A' = (I + A A' / alpha)^-1, where the columns of A are the inputs of past tasks.

    Each task counts as the mean of its samples, so that alpha does not depend on how many there are: A A' is the sum
    over tasks of E[x x']. The paper computes the same inverse recursively, from the mean input of each batch.

    Args:
        alpha: how large an input must be to be protected, as a square, above 0; one number, or one per run.

    Example:
        >>> moment = torch.diag(torch.tensor([0.0, 3.0], dtype=torch.float64))
        >>> OWM(alpha=1.0).update({}, moment, 1)["projection"].diagonal()
        tensor([1.0000, 0.2500], dtype=torch.float64)
    """

    alpha: Number

    def __post_init__(self) -> None:
        check_numbers("alpha", self.alpha, 0, above=True)

    def update(self, state: State, moment: Tensor, count: int) -> State:
        """Return second moment and projection after a task; see `InputProjection.update`."""
        total = moment / count + state["moment"] if state else moment / count
        alpha = self.alpha.to(total) if isinstance(self.alpha, Tensor) else self.alpha
        identity = torch.eye(total.shape[-1]).to(total)
        return {"moment": total, "projection": torch.linalg.inv(identity + total / per_run(alpha, total))}
