"""The optimizers of the gauntlet by name, and those that torch does not have."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the polynomial that brings singular values near 1, as in Muon."""


class Lion(Optimizer):
    """theta <- theta - lr * sign(b1 m + (1 - b1) g), then m <- b2 m + (1 - b2) g."""

    def __init__(self, parameters: Iterable[Tensor], lr: float, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step."""
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                p.sub_(mean.lerp(p.grad, 1 - first).sign_(), alpha=group["lr"])
                mean.lerp_(p.grad, 1 - second)


class MuonAdamW(Optimizer):
    """Muon for matrices and convolutions, and Adam for all other parameters and for embeddings.

    An update of a matrix has the RMS of an update of Adam, 0.2, so that both have one learning rate.
    """

    def __init__(self, model: nn.Module, lr: float, momentum: float = 0.95) -> None:
        embeddings = {layer.weight for layer in model.modules() if isinstance(layer, nn.Embedding)}
        trained = [p for p in model.parameters() if p.requires_grad]
        matrices = [p for p in trained if p.ndim > 1 and p not in embeddings]
        others = [p for p in trained if p.ndim < 2 or p in embeddings]
        groups = [{"params": matrices, "matrices": True}, {"params": others, "matrices": False}]
        super().__init__([group for group in groups if group["params"]], {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p] or self.state[p].update(mean=torch.zeros_like(p), steps=0) or self.state[p]
                state["steps"] += 1
                if group["matrices"]:
                    mean = state["mean"].lerp_(p.grad, 1 - group["momentum"])
                    update = orthogonal(p.grad.lerp(mean, group["momentum"]).flatten(1)).view_as(p)
                    update *= 0.2 * max(update.flatten(1).shape) ** 0.5
                else:
                    square = state.setdefault("square", torch.zeros_like(p))
                    mean = state["mean"].lerp_(p.grad, 0.1) / (1 - 0.9 ** state["steps"])
                    square.mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                    update = mean / ((square / (1 - 0.999 ** state["steps"])).sqrt() + 1e-8)
                p.sub_(update, alpha=group["lr"])


def orthogonal(matrix: Tensor, steps: int = 5) -> Tensor:
    """Return a matrix with the same singular vectors, and singular values between about 0.7 and 1.2.

    Example:
        >>> values = torch.linalg.svdvals(orthogonal(torch.diag(torch.tensor([1.0, 3.0]))))
        >>> bool(((values > 0.6) & (values < 1.3)).all())
        True
    """
    a, b, c = NEWTON_SCHULZ
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


class Lookahead(Optimizer):
    """AdamW, whose parameters go back half of the distance to where they were every few steps.

    Args:
        parameters: what is trained.
        lr: the learning rate of AdamW.
        every: the number of steps of AdamW between two of these returns.
    """

    def __init__(self, parameters: Iterable[Tensor], lr: float, every: int = 5) -> None:
        self.fast = AdamW(parameters, lr=lr)
        super().__init__(self.fast.param_groups, {})
        self.fast.param_groups = self.param_groups
        self.every, self.taken = every, 0
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p]["slow"] = p.detach().clone()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step."""
        self.fast.step()
        self.taken += 1
        if self.taken % self.every == 0:
            for p in (p for group in self.param_groups for p in group["params"]):
                p.copy_(self.state[p]["slow"].lerp_(p, 0.5))


def trained(model: nn.Module) -> list[Tensor]:
    """Return the parameters that train."""
    return [p for p in model.parameters() if p.requires_grad]


OPTIMIZERS: dict[str, Callable[[nn.Module, float], Optimizer]] = {
    "AdamW": lambda model, lr: AdamW(trained(model), lr=lr),
    "Adam": lambda model, lr: Adam(trained(model), lr=lr),
    "SGD": lambda model, lr: SGD(trained(model), lr=lr),
    "SGD momentum": lambda model, lr: SGD(trained(model), lr=lr, momentum=0.9),
    "RMSprop": lambda model, lr: RMSprop(trained(model), lr=lr),
    "Lion": lambda model, lr: Lion(trained(model), lr=lr),
    "Muon": MuonAdamW,
    "Lookahead": lambda model, lr: Lookahead(trained(model), lr=lr),
}

RATES = {"SGD": 0.1, "SGD momentum": 0.03, "Lion": 3e-4, "RMSprop": 1e-3}
"""The middle of three learning rates of a full model with a mean loss; that of the others is 0.003."""


def rates_to_try(optimizer: str, *, adapters: bool, summed: bool, clipped: bool, batch: int) -> list[float]:
    """Return three learning rates, a factor of three apart; adapters have three times those of a full model.

    The gradient of a summed loss is as many times as long as there are samples, so SGD gets as many times smaller
    rates, unless clipping makes the gradient short again.

    Example:
        >>> rates_to_try("AdamW", adapters=False, summed=True, clipped=False, batch=32)
        [0.001, 0.003, 0.009]
        >>> rates_to_try("SGD", adapters=False, summed=True, clipped=False, batch=20)[1]
        0.005
    """
    middle = RATES.get(optimizer, 0.003) * (3 if adapters else 1)
    if summed and not clipped and optimizer.startswith("SGD"):
        middle /= batch
    return [float(f"{middle * factor:.6g}") for factor in (1 / 3, 1, 3)]
