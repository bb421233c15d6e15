"""Stochastic gradient descent of every run of a fleet, each with its own learning rate, momentum and weight decay."""

import torch
from torch import Tensor

from mooring.rules.pull import per_run
from mooring_lab.fleet.fleet_optimizer import FleetOptimizer, Tensors


class SGD(FleetOptimizer):
    """velocity <- momentum * velocity + g; theta <- theta - lr * velocity. The first velocity is g.

    It does what `torch.optim.SGD` does to one network. With weight decay, g <- g + weight_decay * theta before.

    Example:
        >>> sgd = SGD(torch.tensor([0.1, 1.0]))
        >>> theta = torch.zeros(2, 1)
        >>> sgd.step({"theta": theta}, {"theta": torch.ones(2, 1)})
        >>> theta.flatten()
        tensor([-0.1000, -1.0000])
    """

    slots = ("velocity",)

    def allocate(self, name: str, theta: Tensor) -> None:
        """Start the velocity at 0."""
        if name not in self.state["velocity"]:
            self.state["velocity"][name] = torch.zeros_like(theta)

    def update(self, tensors: Tensors, g: Tensor) -> None:
        """Take the step of one parameter as an elementwise rule, for kernels; `velocity` starts at 0."""
        theta, velocity = tensors["theta"], tensors["velocity"]
        if self.decays:
            g = g + per_run(tensors.get("weight_decay", self.weight_decay), theta) * theta
        velocity.mul_(per_run(tensors.get("momentum", self.momentum), velocity)).add_(g)
        theta.sub_(per_run(tensors["lr"], velocity) * velocity)

    @torch.no_grad()
    def step(self, parameters: Tensors, gradients: Tensors) -> None:
        """Move every parameter that has a gradient, in place."""
        velocities = self.state["velocity"]
        for name, g in gradients.items():
            theta = parameters[name]
            if self.decays:
                g = g + per_run(self.weight_decay, theta) * theta
            if isinstance(self.momentum, Tensor) or self.momentum:
                if (velocity := velocities.get(name)) is None:
                    velocity = velocities[name] = g.clone()
                elif isinstance(self.momentum, Tensor):
                    torch.addcmul(g, velocity, torch.as_tensor(per_run(self.momentum, g)), out=velocity)
                else:
                    torch.add(g, velocity, alpha=self.momentum, out=velocity)  # in one pass
                g = velocity
            theta.addcmul_(g, torch.as_tensor(per_run(self.lr, g)), value=-1)

    def in_torch(self, momentum: float) -> torch.optim.Optimizer:
        """Return `torch.optim.SGD` with a momentum."""
        return torch.optim.SGD([torch.zeros(1)], lr=1.0, momentum=momentum)
