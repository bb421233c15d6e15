"""Stochastic gradient descent for every run of a fleet, each at its own learning rate."""

import torch
from torch import Tensor

from mooring.lab.fleet.stack import laid_out
from mooring.runs import per_run

__all__ = ["SGD"]


class SGD:
    """velocity <- momentum * velocity + g; theta <- theta - lr * velocity. The first velocity is g.

    What `torch.optim.SGD` does to one network, with a learning rate for each run.

    Args:
        lr: of shape (runs,).
        momentum: of all runs.
        weight_decay: of all runs; g <- g + weight_decay * theta.

    Example:
        >>> sgd = SGD(torch.tensor([0.1, 1.0]))
        >>> theta = torch.zeros(2, 1)
        >>> sgd.step({"theta": theta}, {"theta": torch.ones(2, 1)})
        >>> theta.flatten()
        tensor([-0.1000, -1.0000])
    """

    def __init__(self, lr: Tensor, momentum: float = 0.0, weight_decay: float = 0.0) -> None:
        self.lr = lr
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.velocity: dict[str, Tensor] = {}

    @torch.no_grad()
    def step(self, parameters: dict[str, Tensor], gradients: dict[str, Tensor]) -> None:
        """Move every parameter that has a gradient."""
        for name, g in gradients.items():
            theta = parameters[name]
            if self.weight_decay:
                g = g + self.weight_decay * theta
            if self.momentum:
                g = self._velocity(name, g)
            theta.addcmul_(g, torch.as_tensor(per_run(self.lr, g)), value=-1)

    def _velocity(self, name: str, g: Tensor) -> Tensor:
        if name not in self.velocity:
            self.velocity[name] = g.clone()
        else:
            torch.add(g, self.velocity[name], alpha=self.momentum, out=self.velocity[name])  # in one pass
        return self.velocity[name]

    def reset(self) -> None:
        """Forget the velocities: a new task begins."""
        self.velocity = {}

    def keep(self, rows: Tensor) -> None:
        """Go on with these runs only."""
        self.lr = self.lr[rows]
        self.velocity = {name: laid_out(velocity[rows]) for name, velocity in self.velocity.items()}
