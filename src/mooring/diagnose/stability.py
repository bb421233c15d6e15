"""Stability of a penalty: whether p = lr * strength * importance interpolates, extrapolates or diverges."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mooring.diagnose.conventions import CONVENTIONS, Convention, convert_strength
from mooring.distributed.dtensor import local_tensor
from mooring.rules.pull import Number, learning_rate, per_run

__all__ = [
    "CONVENTIONS",
    "Convention",
    "Verdicts",
    "convert_strength",
    "divergence_limit",
    "effective_learning_rate",
    "interpolation_weight",
    "largest_safe_strength",
    "learning_rates",
    "rescales",
    "tallies",
    "verdicts",
]

ADAMS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam)


def interpolation_weight(lr: Number, strength: Number, importance: Tensor) -> Tensor:
    """Return p = lr * strength * importance, the weight of the anchor in a step of gradient descent under a penalty.

    theta <- (1 - p) * theta + p * anchor - lr * g. The step interpolates while 0 < p < 1.

    Example:
        >>> interpolation_weight(0.1, 5.0, torch.tensor([1.0, 4.0]))
        tensor([0.5000, 2.0000])
    """
    return per_run(lr, importance) * per_run(strength, importance) * importance


def largest_safe_strength(lr: Number, importance: Tensor) -> float:
    """Return 1 / max(lr * importance), the smallest strength at which a parameter stops interpolating.

    It is infinite if no parameter has importance.

    Example:
        >>> largest_safe_strength(0.5, torch.tensor([1.0, 4.0]))
        0.5
    """
    largest = float((per_run(lr, importance) * importance).max()) if importance.numel() else 0.0
    return 1 / largest if largest > 0 else float("inf")


def effective_learning_rate(lr: Number, strength: Number, importance: Tensor, i: int) -> Tensor:
    """Return lr * (1 - p)^i, the weight of a gradient i iterations ago (the bracket of equation 4).

    Unrolled over n iterations of gradient descent from the anchor:
    theta = anchor - sum_{j<n} effective_learning_rate(n - 1 - j) * g_j.

    Example:
        >>> effective_learning_rate(0.1, 5.0, torch.tensor([0.0, 1.0]), i=2)
        tensor([0.1000, 0.0250])
    """
    return per_run(lr, importance) * (1 - interpolation_weight(lr, strength, importance)) ** i


def divergence_limit(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> float:
    """Return the p from which a penalty alone makes this optimizer diverge.

    Gradient descent: 2. Heavy-ball momentum b with dampening t: 2 (1 + b) / (1 - t). Nesterov:
    2 (1 + b) / (1 + 2 b). Adam's running mean is heavy ball with dampening b1, so 2 (1 + b1) / (1 - b1) for
    its present rate per parameter; NAdam's is Nesterov's. Other optimizers are treated as gradient descent.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> sgd = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
        >>> divergence_limit(sgd, sgd.param_groups[0])
        3.8
    """
    if "betas" in group and isinstance(optimizer, ADAMS):
        momentum = dampening = float(group["betas"][0])
        nesterov = isinstance(optimizer, torch.optim.NAdam)
    else:
        momentum = float(group.get("momentum", 0.0))
        dampening = float(group.get("dampening", 0.0)) if momentum else 0.0  # torch ignores it without momentum
        nesterov = bool(group.get("nesterov"))
    damping = (1 - dampening) * (1 + 2 * momentum if nesterov else 1)
    return 2 * (1 + momentum) / damping if damping > 0 else float("inf")


def learning_rates(optimizer: torch.optim.Optimizer) -> dict[Tensor, Number]:
    """Return the rate at which each parameter moves along its gradient.

    This is the group's lr. If the optimizer rescales it per parameter (the Adam family, RMSprop), it is the present
    lr / (sqrt(v) + eps) from the optimizer's state once there is one; of a sharded parameter, of the local part.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> learning_rates(torch.optim.SGD([weight], lr=0.1))[weight]
        0.1
    """
    return {
        p: learning_rate(group, "diagnose()") * _rescaling(group, optimizer.state.get(p, {}))
        for group in optimizer.param_groups
        for p in group["params"]
    }


def _rescaling(group: dict[str, Any], state: dict[str, Any]) -> Number:
    """Return 1 / (sqrt(v) + eps), or 1 if the optimizer does not rescale."""
    if "exp_avg_sq" in state and "betas" in group:
        v = state.get("max_exp_avg_sq", state["exp_avg_sq"])
        steps = state.get("step", group.get("step"))
        return local_tensor(adam_rescaling(v, None if steps is None else float(steps), group["betas"][1], group["eps"]))
    if _is_rmsprop(state):
        v = state["square_avg"]
        if group.get("centered"):
            v = (v - state["grad_avg"].square()).clamp(min=0)
        return local_tensor(adam_rescaling(v, None, 0.0, group["eps"]))
    return 1.0


def adam_rescaling(v: Tensor, steps: Number | None, beta: float, eps: float) -> Tensor:
    """Return 1 / (sqrt(v / (1 - beta^steps)) + eps), the factor on the learning rate of each weight.

    Args:
        v: the running mean of squared gradients, (...) or (runs, ...).
        steps: that it was taken over; one number, or one per run. None if it did not start at 0.
        beta: its decay.
        eps: the optimizer's.

    Example:
        >>> adam_rescaling(torch.tensor([0.004]), 1.0, beta=0.999, eps=0.0)
        tensor([0.5000])
    """
    if steps is not None:
        v = v / per_run(1 - beta**steps, v)
    return 1 / (v.sqrt() + eps)


def rescales(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer's state has a rate per parameter.

    Example:
        >>> rescales(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1))
        False
    """
    return any("exp_avg_sq" in state or _is_rmsprop(state) for state in optimizer.state.values())


def _is_rmsprop(state: dict[str, Any]) -> bool:
    return "square_avg" in state and "acc_delta" not in state  # Adadelta keeps both


@dataclass(frozen=True)
class Verdicts:
    """The numbers of parameters that a penalty leaves free, interpolates, extrapolates or makes diverge.

    `negative` counts those among `diverge` whose importance is below 0.
    """

    free: int = 0
    interpolate: int = 0
    extrapolate: int = 0
    diverge: int = 0
    negative: int = 0


def verdicts(p: Tensor, limit: float) -> Verdicts:
    """Count parameters: free at 0, interpolating in (0, 1), extrapolating from 1, diverging from `limit` or below 0.

    Example:
        >>> verdicts(torch.tensor([-0.1, 0.0, 0.5, 1.5, 9.0]), limit=2.0)
        Verdicts(free=1, interpolate=1, extrapolate=1, diverge=2, negative=1)
    """
    return Verdicts(*tallies(p.reshape(1, -1), limit)[0].tolist())


def tallies(p: Tensor, limit: Number) -> Tensor:
    """Return the counts of `verdicts` for each row of p, in the order of `Verdicts`: int64 of shape (rows, 5).

    Args:
        p: a tensor of shape (rows, parameters).
        limit: one number, or one per row of shape (rows,).

    Example:
        >>> tallies(torch.tensor([[-0.1, 0.0, 0.5], [1.5, 2.5, 9.0]]), torch.tensor([2.0, 4.0]))
        tensor([[1, 1, 0, 1, 1],
                [0, 0, 2, 1, 0]])
    """
    limit = per_run(limit, p)
    kinds = (p < 0, p == 0, (p >= limit) | p.isnan(), (p >= 1) & (p < limit))
    negative, free, beyond, extrapolate = (kind.sum(1) for kind in kinds)
    interpolate = p.shape[1] - negative - free - extrapolate - beyond
    return torch.stack([free, interpolate, extrapolate, beyond + negative, negative], 1)
