"""What an importance is: state per parameter, started with each task and updated in each iteration."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from mooring.errors import MooringError

__all__ = ["Importance", "Iteration", "State"]

State = dict[str, Tensor]
"""An importance's tensors for one parameter, by name; `current` is the score itself."""


@dataclass(frozen=True)
class Iteration:
    """What one training iteration did to one parameter, as an importance sees it: after the step, before a pull.

    All tensors have the parameter's shape, or that shape behind a leading run axis, or are aligned flat
    pieces of it: an importance is elementwise and cannot tell the difference.

    Attributes:
        g: the gradient of the task's loss alone, never with a penalty inside.
        theta: the parameter after the optimizer's step.
        anchor: its value at the end of the last task (or where this one began), for importances with `needs_anchor`.
        before: the parameter before the optimizer's step, for importances with `needs_step`.
        probe: the gradient of `Importance.probe`, summed over the samples of this iteration.
        samples: how many samples this iteration saw, for importances that watch samples or outputs.
        count: how many iterations of this task the parameter has had a gradient in, this one included.
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
        assert self.anchor is not None, "an importance that reads `d` leaves needs_anchor = True"
        return self.theta - self.anchor

    @property
    def step(self) -> Tensor:
        """What the optimizer did to the parameter: step = theta - before."""
        assert self.before is not None, "an importance that reads `step` sets needs_step = True"
        return self.theta - self.before


class Importance:
    """How much each parameter matters to a task, elementwise.

    A definition of your own is a subclass with `update`, passed to `mooring.attach` as an instance;
    `mooring.testing.check_importance` tells whether it keeps what Mooring promises. The rules it is made of
    are elementwise and accept a leading run axis.

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

    The parameters before the step are then kept in the memory of `current`: `update` computes `current` anew
    instead of reading it, and writes it last.
    """

    needs_anchor: ClassVar[bool] = True
    """Whether `update` reads `Iteration.anchor` or `Iteration.d`; if not, anchors need not be at hand in each step."""

    merges: ClassVar[bool] = True
    """Whether tasks are merged at a consolidation; if not, `current` replaces `previous`."""

    balances: ClassVar[bool] = False
    """Whether scores are rescaled layer by layer, with `factors`."""

    draws: ClassVar[bool] = True
    """Whether `probe` draws random numbers; where it does not, many models can be probed at once."""

    by_layer: ClassVar[bool] = False
    """Whether layers are watched for the Kronecker factors of their curvature (`kronecker_factors`)."""

    every: int = 1
    """Layers are then watched in each `every`-th iteration of a task."""

    largest: int = 4096
    """Layers with more inputs or outputs are then not watched; their parameters have scores of their own."""

    seed: int = 0
    """What random numbers in `start` and `probe` begin from."""

    @property
    def name(self) -> str:
        """The definition's name, as the saved state carries it."""
        return type(self).__name__

    @property
    def watches(self) -> Literal["nothing", "samples", "outputs"]:
        """What of the model's forward pass it needs: nothing, the batch size, or outputs to `probe`."""
        return "nothing"

    @property
    def averages(self) -> bool:
        """Whether `current` is a mean to which iterations add ever less, which a narrow dtype would lose."""
        return False

    @property
    def signed(self) -> bool:
        """Whether scores may be negative."""
        return False

    def start(self, like: Tensor, *, name: str, task: int) -> State:
        """The state at the start of a task: `current` and whatever else `update` keeps.

        Args:
            like: a tensor of the state's shape, dtype and device.
            name: the parameter's name, for definitions that draw at random.
            task: how many tasks were consolidated before this one.
        """
        return {"current": torch.zeros_like(like)}

    def update(self, state: State, it: Iteration) -> None:
        """Bring `state` up to date with this iteration, in place; the iteration's own tensors are not touched."""
        return

    def averaged(self) -> "Importance":
        """The same definition as a mean over all iterations alike, for an estimate from data, which has no order."""
        return self

    def probe(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """A scalar function of the outputs, a sum over samples, whose gradient becomes `Iteration.probe`."""
        raise MooringError(f"{self.name} watches outputs: define probe(outputs, generator), a scalar to differentiate")

    def factors(self, sums: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """One factor for the scores of each layer, asked for where `balances` is true.

        Args:
            sums: the sum of absolute scores in each layer, 0-d or of shape (runs,).
            sizes: how many scores each layer has (in one run).
        """
        return [torch.ones_like(layer) for layer in sums]
