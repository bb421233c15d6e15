"""MAS: the sensitivity of the outputs' squared norm to each parameter; needs no labels."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from mooring.rules.ewc import RunningAverage, average
from mooring.rules.importance import Iteration, State


def sensitivity(probe: Tensor) -> Tensor:
    """Return the score of one batch: |gradient of sum_x ||f(x)||^2|, with the absolute value after the sum.

    Example:
        >>> sensitivity(torch.tensor([-2.0, 3.0]))
        tensor([2., 3.])
    """
    return probe.abs()


@dataclass(frozen=True)
class MAS(RunningAverage):
    """Memory aware synapses: current <- decay * current + (1 - decay) * |grad of sum ||f(x)||^2|.

    A forward hook reads the outputs f(x), and one extra backward pass takes their gradient. It does not change the
    `.grad` of any parameter. But it is a backward pass: your own hooks on tensors and modules run in it too, and
    activations with `retain_grad()` receive it. The outputs keep its result alive until the loss's backward pass.

    Args:
        decay: the weight of earlier iterations in the running average; None takes the mean over the task.

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

    watches: ClassVar[Literal["outputs"]] = "outputs"  # to differentiate their squared norm
    draws: ClassVar[bool] = False
    needs_anchor: ClassVar[bool] = False

    def update(self, state: State, it: Iteration) -> None:
        """Update current <- average(current, |probe|)."""
        assert it.probe is not None
        average(state["current"], sensitivity(it.probe), self.decay, it.count, out=state["current"])

    def probe(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """Return the sum of ||f(x)||^2 over the batch."""
        return outputs.square().sum()
