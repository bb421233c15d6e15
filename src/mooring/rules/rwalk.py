"""RWalk: the Fisher diagonal plus the path's contribution, relative to the distance in the Fisher metric."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mooring.errors import check_number
from mooring.rules.ewc import average, check_decay, fisher_observed
from mooring.rules.importance import Importance, Iteration, State
from mooring.rules.si import path_integral


def walk_score(fisher: Tensor, path: Tensor, d: Tensor, damping: float, *, out: Tensor | None = None) -> Tensor:
    """Return fisher + relu(path) / (fisher * d^2 / 2 + damping).

    Example:
        >>> one = torch.tensor([1.0])
        >>> walk_score(fisher=2 * one, path=3 * one, d=one, damping=0.5)
        tensor([4.])
    """
    doubled = d.square().mul_(fisher).add_(2 * damping)  # twice the denominator, to save a pass over memory
    return torch.addcdiv(fisher, path.relu(), doubled, value=2, out=out)


@dataclass(frozen=True)
class RWalk(Importance):
    """Riemannian walk: current = F + relu(path) / (F * d^2 / 2 + damping), F as in EWC, path as in SI.

    Args:
        decay: the weight of earlier iterations in F's running average; None takes the mean over the task.
        damping: keeps the score finite for parameters that hardly moved.

    Example:
        >>> import mooring
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> moor = mooring.attach(model, optimizer, importance=RWalk(decay=None, damping=0.005))
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()
        >>> moor.current["weight"].round()  # 1 + 0.1 / (0.1^2 / 2 + 0.005)
        tensor([[11., 11.]])
    """

    decay: float | None = 0.2
    damping: float = 1e-3
    needs_step: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_decay(self.decay)
        check_number("damping", self.damping, 0, above=True)

    def start(self, like: Tensor, *, name: str, task: int) -> State:
        """Return current, F and path at zero."""
        return {slot: torch.zeros_like(like) for slot in ("current", "fisher", "path")}

    def update(self, state: State, it: Iteration) -> None:
        """Update F and path, then current = walk_score."""
        fisher = average(state["fisher"], fisher_observed(it.g), self.decay, it.count, out=state["fisher"])
        path = path_integral(state["path"], it.g, it.step, out=state["path"])
        walk_score(fisher, path, it.d, self.damping, out=state["current"])
