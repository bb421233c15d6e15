"""Define a method of your own, check it, and compare it with plain fine-tuning and with EWC's explicit step.

A weight matters by how far it travelled in its task. After each step every weight returns towards its value at the end
of the previous task: the more, the further it travelled before and the less it has travelled since.

mooring methods --check own_method:TRAVELLED
mooring compare --methods plain,explicit-ewc,own_method:TRAVELLED --seeds 3 --epochs 3
mooring frontier --methods plain,own_method:TRAVELLED --seeds 3 --epochs 3
"""

import torch
from torch import Tensor

import mooring
from mooring.rules import Importance, Iteration, State
from mooring_lab.methods import Method


class Travelled(Importance):
    """current <- current + |step|: a weight matters by how far it travelled."""

    needs_step = True  # asks for it.step; `current` is then written and not read

    def start(self, like: Tensor, *, name: str, task: int) -> State:
        """Return the state of a parameter at the start of a task."""
        return {"current": torch.zeros_like(like), "distance": torch.zeros_like(like)}

    def update(self, state: State, it: Iteration) -> None:
        """Add the length of the step, in place and elementwise."""
        state["distance"] += it.step.abs()
        state["current"].copy_(state["distance"])


TRAVELLED = Method(
    "travelled",
    "interpolate by the ratio of the distances that weights travelled, with a stiffness (its strength)",
    importance=lambda seed: Travelled(),
    pull=lambda stiffness: mooring.Interpolation(stiffness=stiffness),
    strength=1.0,
    dial=(0.01, 0.03, 0.1, 0.3, 1.0),
)
