"""SI: each parameter's contribution to the decrease of the loss along the path of training."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from mooring.errors import check_number, unknown
from mooring.rules.ewc import average
from mooring.rules.importance import Importance, Iteration, State
from mooring.rules.random import uniform_draw

SIGNS = ("rectified", "absolute", "signed")
"""Options of `sign` that treat every score in the same way."""

PATHS = ("integral", "rising")
"""Options of `path`, which RWalk has too."""

RISING_DECAY = 0.2
"""The weight of earlier iterations in the running average of a rising path."""

FLIPPED = 0.001
"""The share of parameters whose score "flipped" makes negative."""


def path_integral(path: Tensor, g: Tensor, step: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Compute path <- path - g * step: the first-order decrease of the loss in a step, parameter by parameter.

    Example:
        >>> path_integral(torch.tensor([0.0]), g=torch.tensor([2.0]), step=torch.tensor([-0.5]))
        tensor([1.])
    """
    return torch.addcmul(path, g, step, value=-1, out=out)


def rising_path(path: Tensor, g: Tensor, moved: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Compute path <- 0.2 * path + 0.8 * relu(g * moved), where moved = theta - theta at the start of the epoch.

    It is positive where a parameter moved against its present descent: where the loss, to first order, has risen.

    Example:
        >>> rising_path(torch.tensor([5.0, 5.0]), g=torch.tensor([2.0, 2.0]), moved=torch.tensor([-0.5, 0.5]))
        tensor([1.0000, 1.8000])
    """
    return average(path, (g * moved).relu(), RISING_DECAY, 1, out=out)


def update_path(kind: str, state: State, it: Iteration) -> Tensor:
    """Update and return `path`; a rising one also needs `epoch_start`, the displacement at the start of the epoch."""
    if kind == "integral":
        return path_integral(state["path"], it.g, it.step, out=state["path"])
    return rising_path(state["path"], it.g, it.d - state["epoch_start"], out=state["path"])


def start_epoch(state: State, d: Tensor) -> None:
    """Start an epoch at this displacement, for a rising path."""
    if "epoch_start" in state:
        state["epoch_start"].copy_(d)


def check_path(path: str) -> None:
    """Refuse an unknown path."""
    if path not in PATHS:
        raise unknown("path", path, PATHS)


def path_score(path: Tensor, d: Tensor, damping: float) -> Tensor:
    """Return path / (d^2 + damping), with the sign of the path.

    Example:
        >>> path_score(torch.tensor([1.0]), d=torch.tensor([1.0]), damping=1.0)
        tensor([0.5000])
    """
    distance = d.square().add_(damping)
    return torch.div(path, distance, out=distance)


def signed_score(
    score: Tensor, sign: str | float, chosen: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor:
    """Apply the option for negative scores: "rectified" sets them to 0, "absolute" and "signed" as named.

    With a fraction, scores are absolute except where `chosen` is true, where they keep their sign; with "flipped" they
    are negative there.

    Example:
        >>> signed_score(torch.tensor([-1.0, 2.0]), "rectified")
        tensor([0., 2.])
    """
    if sign == "rectified":
        return torch.clamp(score, min=0, out=out)
    if sign == "absolute":
        return torch.abs(score, out=out)
    if sign == "signed":
        return torch.clone(score) if out is None else out.copy_(score)
    assert chosen is not None
    return torch.where(chosen, -score.abs() if sign == "flipped" else score, score.abs(), out=out)


@dataclass(frozen=True)
class SI(Importance):
    """Synaptic intelligence: path <- path - g * step; current = relu(path) / (d^2 + damping).

    Args:
        damping: keeps the score finite for parameters that hardly moved.
        sign: "rectified" (as in the original code), "absolute", "signed" (as in the original paper), or a fraction such
            as 0.001: absolute, but that share of the parameters, chosen at random, keeps its sign; or "flipped":
            absolute, but a thousandth of the parameters is negative, to show the effect. Negative scores make a
            penalty extrapolate; see `mooring.diagnose.stability`.
        seed: the seed of the choice of these parameters.
        path: "integral" is SI's. "rising" is `rising_path`, the definition in the public code of Lubana et al.
            (https://github.com/EkdeepSLubana/QRforgetting, commit 317fd2d), which has damping=1e-10 and merges the
            scores at the distance after the last pull. Call `Mooring.start_epoch` before each further epoch of a task.

    Example:
        >>> import mooring
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> moor = mooring.attach(model, optimizer, importance=SI())
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()
        >>> moor.current["weight"]  # 0.1 / (0.1^2 + 0.001)
        tensor([[9.0909, 9.0909]])
    """

    damping: float = 1e-3
    sign: Literal["rectified", "absolute", "signed", "flipped"] | float = "rectified"
    seed: int = 0
    path: Literal["integral", "rising"] = "integral"
    needs_step: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_number("damping", self.damping, 0, above=True)
        check_path(self.path)
        if isinstance(self.sign, str):
            if self.sign not in (*SIGNS, "flipped"):
                raise unknown("sign", self.sign, [*SIGNS, "flipped", "a fraction"])
        else:
            check_number("sign", self.sign, 0, 1)

    @property
    def signed(self) -> bool:
        """True unless rectified or absolute."""
        return self.sign not in ("rectified", "absolute")

    def start(self, like: Tensor, *, name: str, task: int) -> State:
        """Return current and path at zero and, if needed, the parameters that keep their sign or are flipped."""
        state = {"current": torch.zeros_like(like), "path": torch.zeros_like(like)}
        if self.path == "rising":
            state["epoch_start"] = torch.zeros_like(like)
        if self.sign not in SIGNS:
            share = FLIPPED if isinstance(self.sign, str) else self.sign
            state["keeps_sign"] = uniform_draw(like, self.seed, name, task) < share
        return state

    def update(self, state: State, it: Iteration) -> None:
        """Update the path and current = signed_score(path_score(path))."""
        update_path(self.path, state, it)
        self._score(state, it.d)

    def _score(self, state: State, d: Tensor) -> None:
        score = path_score(state["path"], d, self.damping)
        signed_score(score, self.sign, state.get("keeps_sign"), out=state["current"])

    def start_epoch(self, state: State, d: Tensor) -> None:
        """Measure the movement of a rising path from here on."""
        start_epoch(state, d)

    def end_task(self, state: State, d: Tensor) -> None:
        """Divide a rising path by the distance after the last pull."""
        if self.path == "rising":
            self._score(state, d)
