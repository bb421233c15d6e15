"""AdamW of every run of a fleet, each with its own learning rate, first beta and weight decay."""

from collections.abc import Collection

import torch
from torch import Tensor

from mooring.diagnose.stability import adam_rescaling
from mooring.rules.pull import Number, per_run
from mooring_lab.fleet.fleet_optimizer import FleetOptimizer, Tensors
from mooring_lab.model.adam import EPSILON, SECOND_BETA, adam_moments


class AdamW(FleetOptimizer):
    """theta <- (1 - lr * weight_decay) * theta; theta <- theta - lr * mean / (sqrt(square) + 1e-8).

    Mean and square are the running means of g and g^2 of this task, corrected for their start at 0. Their betas are
    the momentum and 0.999. It does what `torch.optim.AdamW` does to one network.

    Example:
        >>> adamw = AdamW(torch.tensor([0.1, 1.0]), momentum=0.9)
        >>> theta = torch.zeros(2, 1)
        >>> adamw.step({"theta": theta}, {"theta": torch.full((2, 1), 5.0)})
        >>> theta.flatten()
        tensor([-0.1000, -1.0000])
    """

    slots = ("exp_avg", "exp_avg_sq", "step")

    def allocate(self, name: str, theta: Tensor) -> None:
        """Start running means and the count of steps at 0; the count is float64 of shape (runs,)."""
        if name not in self.state["step"]:
            self.state["exp_avg"][name], self.state["exp_avg_sq"][name] = (torch.zeros_like(theta) for _ in range(2))
            self.state["step"][name] = torch.zeros_like(self.base)

    def elements(self, name: str) -> Tensors:
        """Return the running means of a parameter."""
        return {slot: self.state[slot][name] for slot in ("exp_avg", "exp_avg_sq")}

    def count_step(self, names: Collection[str], rows: slice, *, dry: bool = False) -> dict[str, Tensors]:
        """Count a step of these parameters in some runs, unless `dry`; return the corrections of their means."""
        steps = [self.state["step"][name][rows] for name in names]
        if steps and not dry:
            torch._foreach_add_(steps, 1)
        stacked = torch.stack(steps) if steps else self.base.new_empty(0)
        first = self.momentum[rows].double() if isinstance(self.momentum, Tensor) else self.momentum
        corrections = zip(names, (1 - first**stacked).unbind(), (1 - SECOND_BETA**stacked).unbind(), strict=True)
        return {name: {"mean_correction": mean, "square_correction": square} for name, mean, square in corrections}

    def update(self, tensors: Tensors, g: Tensor) -> None:
        """Take the step of one parameter as an elementwise rule."""
        theta, lr = tensors["theta"], per_run(tensors["lr"], tensors["theta"])
        if self.decays:
            theta.mul_(1 - lr * per_run(tensors.get("weight_decay", self.weight_decay), theta))
        numbers: list[Number] = [tensors.get("momentum", self.momentum)]
        numbers += [tensors[name].to(theta.dtype) for name in ("mean_correction", "square_correction")]
        mean, spread = adam_moments(
            tensors["exp_avg"], tensors["exp_avg_sq"], g, *(per_run(number, theta) for number in numbers)
        )
        theta.sub_(lr * mean / spread)

    @torch.no_grad()
    def step(self, parameters: Tensors, gradients: Tensors) -> None:
        """Move every parameter that has a gradient, in place."""
        for name in gradients:
            self.allocate(name, parameters[name])
        every = slice(None)
        corrections, numbers = self.count_step(gradients.keys(), every), self.per_run_numbers(every)
        for name, g in gradients.items():
            self.update({"theta": parameters[name], **self.elements(name), **numbers, **corrections[name]}, g)

    def in_torch(self, momentum: float) -> torch.optim.Optimizer:
        """Return `torch.optim.AdamW` with a first beta."""
        return torch.optim.AdamW([torch.zeros(1)], lr=1.0, betas=(momentum, SECOND_BETA))

    def rescaling(self, name: str) -> Tensor | None:
        """Return 1 / (sqrt(square) + 1e-8) of each weight; None before the first step of a task."""
        if (square := self.state["exp_avg_sq"].get(name)) is None:
            return None
        return adam_rescaling(square, self.state["step"][name], SECOND_BETA, EPSILON).to(square.dtype)
