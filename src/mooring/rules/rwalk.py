"""RWalk: the Fisher diagonal plus the path's contribution, relative to the distance in the Fisher metric."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from mooring.errors import check_number
from mooring.rules.ewc import average, check_decay, fisher_observed
from mooring.rules.importance import Importance, Iteration, State
from mooring.rules.si import RISING_DECAY, check_path, start_epoch, update_path


def walk_score(fisher: Tensor, path: Tensor, d: Tensor, damping: float, *, out: Tensor | None = None) -> Tensor:
    """Return fisher + relu(path) / (fisher * d^2 / 2 + damping).

    Example:
        >>> one = torch.tensor([1.0])
        >>> walk_score(fisher=2 * one, path=3 * one, d=one, damping=0.5)
        tensor([4.])
    """
    doubled = d.square().mul_(fisher).add_(2 * damping)  # twice the denominator, to save a pass over memory
    return torch.addcdiv(fisher, path.relu(), doubled, value=2, out=out)


def parameter_fisher(fisher: Tensor, g: Tensor, theta: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Compute F <- 0.2 * F + 0.8 * (g * theta)^2.

    Example:
        >>> parameter_fisher(torch.tensor([5.0]), g=torch.tensor([2.0]), theta=torch.tensor([0.5]))
        tensor([1.8000])
    """
    return average(fisher, fisher_observed(g * theta), RISING_DECAY, 1, out=out)


@dataclass(frozen=True)
class RWalk(Importance):
    """Riemannian walk: current = F + relu(path) / (F * d^2 / 2 + damping), F as in EWC, path as in SI.

    Args:
        decay: the weight of earlier iterations in F's running average; None takes the mean over the task.
        damping: keeps the score finite for parameters that hardly moved.
        path: "integral" is the original one. "rising" is the definition in the public code of Lubana et al., as for
            `SI`: the path is `rising_path`, F is `parameter_fisher` and continues from task to task, and current =
            F + path / (F * d^2 + damping) with damping=1e-10. The decay has no effect there.

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
    path: Literal["integral", "rising"] = "integral"
    needs_step: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_decay(self.decay)
        check_path(self.path)
        check_number("damping", self.damping, 0, above=True)

    def start(self, like: Tensor, *, name: str, task: int) -> State:
        """Return current, F and path at zero."""
        slots = ("current", "fisher", "path", *(("epoch_start",) if self.path == "rising" else ()))
        return {slot: torch.zeros_like(like) for slot in slots}

    @property
    def carries(self) -> tuple[str, ...]:
        """F, with a rising path."""
        return ("fisher",) if self.path == "rising" else ()

    def start_epoch(self, state: State, d: Tensor) -> None:
        """Measure the movement of a rising path from here on."""
        start_epoch(state, d)

    def end_task(self, state: State, d: Tensor) -> None:
        """Divide a rising path by the distance after the last pull."""
        if self.path == "rising":
            self._score(state, d)

    def update(self, state: State, it: Iteration) -> None:
        """Update F and path, then current = walk_score."""
        update_path(self.path, state, it)
        if self.path == "rising":
            parameter_fisher(state["fisher"], it.g, it.theta, out=state["fisher"])
        else:
            average(state["fisher"], fisher_observed(it.g), self.decay, it.count, out=state["fisher"])
        self._score(state, it.d)

    def _score(self, state: State, d: Tensor) -> None:
        path, damping = state["path"], self.damping
        if self.path == "rising":
            path, damping = path / 2, damping / 2  # its distance has no 1/2
        walk_score(state["fisher"], path, d, damping, out=state["current"])
