"""MAS: how sensitive the squared norm of the outputs is to each parameter; needs no labels."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from mooring.importance.averaging import average, check_decay
from mooring.importance.definition import Importance, Iteration, State

__all__ = ["MAS", "sensitivity"]


def sensitivity(probe: Tensor) -> Tensor:
    """The score of one batch: |gradient of sum_x ||f(x)||^2|, the absolute value taken after the sum.

    Example:
        >>> sensitivity(torch.tensor([-2.0, 3.0]))
        tensor([2., 3.])
    """
    return probe.abs()


@dataclass(frozen=True)
class MAS(Importance):
    """Memory aware synapses: current <- decay * current + (1 - decay) * |grad of sum ||f(x)||^2|.

    A forward hook sees the outputs f(x), and one extra backward pass takes the gradient beside the loss's own. It
    touches no `.grad` of a parameter, but it is a backward pass: hooks of your own on tensors and modules run in
    it too, and activations that `retain_grad()` collect it. Until the loss's backward pass, the outputs keep it alive.

    Args:
        decay: the weight of the past in the running average; None takes the mean over the task.

    Example:
        >>> import mooring
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> moor = mooring.attach(model, optimizer, importance=MAS(decay=None))
        >>> _ = torch.nn.init.constant_(model.weight, 3.0)
        >>> model(torch.tensor([[1.0], [2.0]])).sum().backward()
        >>> optimizer.step()
        >>> moor.current["weight"]  # 2 * w * sum x^2
        tensor([[30.]])
    """

    decay: float | None = 0.2
    draws: ClassVar[bool] = False
    needs_anchor: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Refuse options outside their range."""
        check_decay(self.decay)

    @property
    def averages(self) -> bool:
        """Without a decay."""
        return self.decay is None

    @property
    def watches(self) -> Literal["outputs"]:
        """The outputs, whose squared norm is differentiated."""
        return "outputs"

    def update(self, state: State, it: Iteration) -> None:
        """current <- average(current, |probe|)."""
        assert it.probe is not None
        average(state["current"], sensitivity(it.probe), self.decay, it.count, out=state["current"])

    def averaged(self) -> "MAS":
        """Without a decay."""
        return replace(self, decay=None)

    def probe(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """sum over the batch of ||f(x)||^2."""
        return outputs.square().sum()
