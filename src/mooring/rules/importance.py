"""Base class of importances: a state per parameter, started with each task and updated in each iteration."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from mooring.errors import MooringError

State = dict[str, Tensor]
"""The tensors of an importance for one parameter, by name; `current` is the score."""


@dataclass(frozen=True)
class Iteration:
    """One training iteration of one parameter, after the optimizer's step and before a pull.

    All tensors have the parameter's shape, or that shape behind a leading run axis, or are aligned flat pieces of it.
    An importance is elementwise, so it does not need to know which.

    Attributes:
        g: the gradient of the task's loss alone, without a penalty.
        theta: the parameter after the optimizer's step.
        anchor: its value at the end of the last task, or at the start of the first, for importances with
            `needs_anchor`.
        before: the parameter before the optimizer's step, for importances with `needs_step`.
        probe: the gradient of `Importance.probe`, summed over the samples of this iteration.
        samples: the number of samples in this iteration, for importances that watch samples or outputs.
        count: the number of iterations of this task with a gradient of the parameter, including this one.
    """

    TENSORS: ClassVar[tuple[str, ...]] = ("g", "theta", "anchor", "before", "probe")

    g: Tensor
    theta: Tensor
    anchor: Tensor | None = None
    before: Tensor | None = None
    probe: Tensor | None = None
    samples: int = 0
    count: int = 1

    @property
    def d(self) -> Tensor:
        """The displacement: d = theta - anchor."""
        assert self.anchor is not None, "an importance that reads `d` needs needs_anchor = True"
        return self.theta - self.anchor

    @property
    def step(self) -> Tensor:
        """The optimizer's change of the parameter: step = theta - before."""
        assert self.before is not None, "an importance that reads `step` needs needs_step = True"
        return self.theta - self.before


class Importance:
    """A score of how much each parameter matters to a task, elementwise.

    To define an importance, write a subclass with `update`, and pass an instance to `mooring.attach`. Test it with
    `mooring.testing.check_importance`. Its rules must be elementwise and accept a leading run axis.

    Example:
        >>> class Magnitude(Importance):
        ...     def update(self, state, it):
        ...         state["current"].copy_(it.theta.abs())
        >>> it = Iteration(g=torch.zeros(2), theta=torch.tensor([-2.0, 1.0]), anchor=torch.zeros(2))
        >>> state = Magnitude().start(it.theta, name="weight", task=0)
        >>> Magnitude().update(state, it)
        >>> state["current"]
        tensor([2., 1.])
    """

    needs_step: ClassVar[bool] = False
    """Whether `update` reads `Iteration.step`.

    The parameters before the step are then stored in the memory of `current`, so `update` must not read `current` and
    must write it last.
    """

    needs_anchor: ClassVar[bool] = True
    """Whether `update` reads `Iteration.anchor` or `Iteration.d`; if not, steps need not load the anchors."""

    merges: ClassVar[bool] = True
    """Whether tasks are merged at a consolidation; if not, `current` replaces `previous`."""

    balances: ClassVar[bool] = False
    """Whether scores are rescaled layer by layer, by `factors`."""

    draws: ClassVar[bool] = True
    """Whether `probe` draws random numbers; if not, many models can be probed at once."""

    by_layer: ClassVar[bool] = False
    """Whether layers are observed for the Kronecker factors of their curvature (`kronecker_factors`)."""

    every: int = 1
    """With `by_layer`: observe layers in each `every`-th iteration of a task."""

    largest: int = 4096
    """With `by_layer`: layers with more inputs or outputs have elementwise scores instead."""

    blocks: int | None = None
    """With `by_layer`: the largest size of a block, if factors are block-diagonal; None for whole factors."""

    places: int | None = None
    """With `by_layer`: the largest number of places of a sample that factors are computed from; None for all."""

    seed: int = 0
    """The seed of the random numbers in `start` and `probe`."""

    @property
    def name(self) -> str:
        """The name of the importance, which a saved state contains."""
        return type(self).__name__

    @property
    def watches(self) -> Literal["nothing", "samples", "outputs"]:
        """What it needs of the forward pass: nothing, the number of samples, or outputs to `probe`."""
        return "nothing"

    @property
    def averages(self) -> bool:
        """Whether `current` is a mean over the task, whose small updates a narrow dtype would lose."""
        return False

    @property
    def signed(self) -> bool:
        """Whether scores may be negative."""
        return False

    @property
    def carries(self) -> tuple[str, ...]:
        """The tensors that the next task continues with, instead of those that `start` returns."""
        return ()

    def start(self, like: Tensor, *, name: str, task: int) -> State:
        """Return the state at the start of a task: `current`, and other tensors that `update` needs.

        Args:
            like: a tensor of the state's shape, dtype and device.
            name: the parameter's name, for importances that draw at random.
            task: the number of tasks consolidated before this one.
        """
        return {"current": torch.zeros_like(like)}

    def update(self, state: State, it: Iteration) -> None:
        """Update `state` in place with this iteration; do not write to the iteration's tensors."""

    def start_epoch(self, state: State, d: Tensor) -> None:
        """Start an epoch of a task, in place, for importances that read the movement within one.

        Args:
            state: the tensors of the importance.
            d: the displacement from the anchor.
        """

    def end_task(self, state: State, d: Tensor) -> None:
        """Complete `current` in place before tasks are merged; by default it stays as `update` left it.

        Args:
            state: the tensors of the importance.
            d: the displacement from the anchor, after the last pull.
        """

    def averaged(self) -> "Importance":
        """Return the same importance as a mean over all iterations, for an estimate from data, which has no order."""
        return self

    def probe(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """Return a scalar function of the outputs, a sum over samples; its gradient becomes `Iteration.probe`."""
        raise MooringError(f"{self.name} watches outputs: define probe(outputs, generator), a scalar to differentiate")

    def factors(self, sums: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Return one factor for the scores of each layer; called if `balances` is true.

        Args:
            sums: the sum of absolute scores in each layer, 0-d or of shape (runs,).
            sizes: the number of scores in each layer (of one run).
        """
        return [torch.ones_like(layer) for layer in sums]
