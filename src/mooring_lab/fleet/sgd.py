"""Stochastic gradient descent of every run of a fleet, each with its own learning rate, momentum and weight decay."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mooring.rules.pull import per_run
from mooring_lab.fleet.stack.stack import to_stack_layout
from mooring_lab.model.spec import RunSpec


class SGD:
    """velocity <- momentum * velocity + g; theta <- theta - lr * velocity. The first velocity is g.

    It does what `torch.optim.SGD` does to one network.

    Args:
        lr: of shape (runs,).
        momentum: of all runs, or of shape (runs,).
        weight_decay: the same; g <- g + weight_decay * theta.

    Example:
        >>> sgd = SGD(torch.tensor([0.1, 1.0]))
        >>> theta = torch.zeros(2, 1)
        >>> sgd.step({"theta": theta}, {"theta": torch.ones(2, 1)})
        >>> theta.flatten()
        tensor([-0.1000, -1.0000])
    """

    def __init__(self, lr: Tensor, momentum: float | Tensor = 0.0, weight_decay: float | Tensor = 0.0) -> None:
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        self.velocity: dict[str, Tensor] = {}
        self.sizes: dict[int, Tensor] = {}

    @classmethod
    def of(cls, specs: Sequence[RunSpec], like: Tensor) -> "SGD":
        """Return the optimizer of these runs.

        Example:
            >>> specs = [RunSpec("digits", "0", "plain", 0, lr=0.1, momentum=momentum) for momentum in (0.0, 0.5)]
            >>> sgd = SGD.of(specs, torch.zeros(()))
            >>> sgd.lr, sgd.momentum, sgd.weight_decay
            (tensor([0.1000, 0.1000]), tensor([0.0000, 0.5000]), 0.0)
        """
        columns = ([spec.momentum for spec in specs], [spec.weight_decay for spec in specs])
        numbers = (values[0] if len({*values}) == 1 else like.new_tensor(values) for values in columns)
        return cls(like.new_tensor([spec.lr for spec in specs]), *numbers)

    def set_epoch(self, specs: Sequence[RunSpec], epoch: int) -> None:
        """Set the learning rates of an epoch in place: recorded steps and kernels read this memory.

        Example:
            >>> settings = {"lr": 1.0, "epochs": 2}
            >>> specs = [RunSpec("digits", "0", "plain", 0, schedule=s, **settings) for s in ("constant", "cosine")]
            >>> sgd = SGD.of(specs, torch.zeros(()))
            >>> sgd.set_epoch(specs, 1)
            >>> sgd.lr
            tensor([1.0000, 0.5000])
        """
        if any(spec.schedule != "constant" for spec in specs):
            self.lr.copy_(self.lr.new_tensor([spec.lr_in(epoch) for spec in specs]))

    @property
    def decays(self) -> bool:
        """Whether any run's weights decay."""
        return isinstance(self.weight_decay, Tensor) or self.weight_decay != 0

    def per_run_numbers(self, rows: slice) -> dict[str, Tensor]:
        """Return the numbers that differ between runs, of some runs, by name."""
        numbers = {"lr": self.lr, "momentum": self.momentum, "weight_decay": self.weight_decay}
        return {name: value[rows] for name, value in numbers.items() if isinstance(value, Tensor)}

    def size(self, samples: int) -> Tensor:
        """Return a batch size on the device, so that batches of different sizes share their kernels."""
        if samples not in self.sizes:
            self.sizes[samples] = self.lr.new_tensor(samples)
        return self.sizes[samples]

    def update(self, tensors: dict[str, Tensor], g: Tensor) -> None:
        """Take the step of one parameter as an elementwise rule, for kernels; `velocity` starts at 0.

        Args:
            tensors: theta and velocity, changed in place, and the numbers of `per_run_numbers`.
            g: the gradient.
        """
        theta, velocity = tensors["theta"], tensors["velocity"]
        if self.decays:
            g = g + per_run(tensors.get("weight_decay", self.weight_decay), theta) * theta
        velocity.mul_(per_run(tensors.get("momentum", self.momentum), velocity)).add_(g)
        theta.sub_(per_run(tensors["lr"], velocity) * velocity)

    @torch.no_grad()
    def step(self, parameters: dict[str, Tensor], gradients: dict[str, Tensor]) -> None:
        """Move every parameter that has a gradient."""
        for name, g in gradients.items():
            theta = parameters[name]
            if self.decays:
                g = g + per_run(self.weight_decay, theta) * theta
            if isinstance(self.momentum, Tensor) or self.momentum:
                if (velocity := self.velocity.get(name)) is None:
                    velocity = self.velocity[name] = g.clone()
                elif isinstance(self.momentum, Tensor):
                    torch.addcmul(g, velocity, torch.as_tensor(per_run(self.momentum, g)), out=velocity)
                else:
                    torch.add(g, velocity, alpha=self.momentum, out=velocity)  # in one pass
                g = velocity
            theta.addcmul_(g, torch.as_tensor(per_run(self.lr, g)), value=-1)

    def keep(self, rows: Tensor) -> None:
        """Keep the runs in these rows, in this order."""
        self.lr = self.lr[rows]
        self.momentum, self.weight_decay = (
            value[rows] if isinstance(value, Tensor) else value for value in (self.momentum, self.weight_decay)
        )
        self.velocity = {name: to_stack_layout(velocity[rows]) for name, velocity in self.velocity.items()}
