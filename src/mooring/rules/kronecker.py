"""Kronecker: the curvature of a layer as a Kronecker product of two factors, from its inputs and output gradients."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from mooring.errors import check_whole
from mooring.rules.ewc import average, fisher_observed
from mooring.rules.importance import Importance, Iteration, State


@dataclass(frozen=True)
class Kronecker(Importance):
    """The Fisher information of each linear and convolutional layer as G (x) A; only for `Budget`.

    A is the mean of a a' over a layer's inputs a, and G is the mean of b b' over the gradients b of its outputs, both
    over the iterations of a task. A weight displaced by d then costs tr(G d A d') / 2 nats, which includes the effect
    of weights that move together. The diagonal, which `EWC` keeps, misses that by orders of magnitude. Biases have
    their own G, and each group of a convolution its own A and G. Parameters of other layers have the diagonal, and so
    has a layer whose weight is not a plain parameter, is read without a call of the layer, or belongs to a module of
    another kind too.

    Layers with more than `largest` inputs or outputs have the diagonal. With `blocks`, factors of all layers are
    block-diagonal instead, which misses what weights of different blocks do together: memory and time then grow with
    the width of a layer, not with its square.

    It costs two matrix products per layer in each `every`-th iteration, two more for each pull, one eigendecomposition
    of A and of G per consolidation, and 3 * (in^2 + out^2) numbers per layer; for a convolution in = channels * kernel.

    Only backward passes whose gradients a step uses count, in the scale in which the step uses them: unscaled with a
    GradScaler, and clipped if they are clipped.

    Args:
        every: observe layers in each `every`-th iteration of a task.
        batch_size: the number of samples per iteration, if the model's outputs do not show it.
        largest: layers with more inputs or outputs have the diagonal, such as the output layer of a language model.
        blocks: the largest size of a block, if factors are to be block-diagonal, such as 512 for models of a billion
            parameters; then `largest` has no effect.
        places: the largest number of places of a sample, pixels or positions, from which factors of weights are
            computed; by default all.

    Example:
        >>> import torch, mooring
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> moor = mooring.attach(model, optimizer, importance=Kronecker(), pull=mooring.Budget(0.01))
        >>> for step in range(8):
        ...     optimizer.zero_grad()
        ...     torch.nn.functional.cross_entropy(model(torch.randn(16, 4)), torch.randint(2, (16,))).backward()
        ...     optimizer.step()
        ...     if step == 3:
        ...         moor.consolidate()
        >>> moor.pull_energy() <= 0.01
        True
    """

    every: int = 1
    batch_size: int | None = None
    largest: int = 4096
    blocks: int | None = None
    places: int | None = None
    needs_anchor: ClassVar[bool] = False
    by_layer: ClassVar[bool] = True
    averages: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_whole("every", self.every, 1)
        check_whole("largest", self.largest, 1)
        for name in ("batch_size", "blocks", "places"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), 1)

    @property
    def watches(self) -> Literal["nothing", "samples", "outputs"]:
        """The number of samples, unless batch_size is given."""
        return "samples" if self.batch_size is None else "nothing"

    def averaged(self) -> "Kronecker":
        """Return the same importance with every=1."""
        return replace(self, every=1)

    def update(self, state: State, it: Iteration) -> None:
        """Update current <- mean over the task of samples * g^2, for parameters without Kronecker factors."""
        score = fisher_observed(it.g, self.batch_size or it.samples)
        average(state["current"], score, None, it.count, out=state["current"])
