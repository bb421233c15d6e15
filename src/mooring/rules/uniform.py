"""Uniform: the same score for every parameter (the paper's Vanilla)."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from mooring.rules.importance import Importance, State


@dataclass(frozen=True)
class Uniform(Importance):
    """A score of 1 everywhere, not merged. With a penalty this is L2 regularization towards the anchor.

    It needs no memory beyond the anchor: the score is one number per parameter tensor.

    Example:
        >>> import torch
        >>> Uniform().start(torch.empty(2, 3), name="weight", task=0)
        {'current': tensor(1.)}
    """

    needs_anchor: ClassVar[bool] = False
    merges: ClassVar[bool] = False

    def start(self, like: Tensor, *, name: str, task: int) -> State:
        """Return current = 1, which broadcasts."""
        return {"current": like.new_ones(())}
