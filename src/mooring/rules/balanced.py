"""Balanced: rescales the scores of another importance to the same mean in each layer."""

from collections.abc import Sequence
from operator import attrgetter
from typing import ClassVar

import torch
from torch import Tensor

from mooring.errors import MooringError
from mooring.rules.importance import Importance, Iteration, State
from mooring.rules.importance_names import resolve


def balance(sums: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
    """Return the factors that bring each layer's mean to the mean over all layers.

    factor_l = mean over all scores / mean over layer l; 1 if a layer has no importance. The arguments are those of
    `Importance.factors`.

    Example:
        >>> balance([torch.tensor(8.0), torch.tensor(2.0)], [1, 1])
        [tensor(0.6250), tensor(2.5000)]
    """
    overall = torch.stack(list(sums)).sum(0) / sum(sizes)
    means = [layer / size for layer, size in zip(sums, sizes, strict=True)]
    return [torch.where(mean > 0, overall / mean, 1.0) for mean in means]


class Balanced(Importance):
    """An importance whose scores have the same mean in each layer, so that deep layers are held like early ones.

    A layer is a module that owns parameters; its weight and bias are scaled together. Both `current` and
    `previous` are balanced, and the mean over the whole model does not change.

    Args:
        importance: the importance to balance; an instance or a name.

    Example:
        >>> import mooring
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> moor = mooring.attach(model, optimizer, importance=Balanced("ewc"))
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()
        >>> moor.consolidate()
        >>> layers = moor.diagnose(strength=1.0).layers
        >>> abs(layers[0].mean - layers[1].mean) < 1e-6
        True
    """

    balances: ClassVar[bool] = True
    needs_step = property(attrgetter("importance.needs_step"))
    needs_anchor = property(attrgetter("importance.needs_anchor"))
    averages = property(attrgetter("importance.averages"))
    signed = property(attrgetter("importance.signed"))
    draws = property(attrgetter("importance.draws"))
    merges = property(attrgetter("importance.merges"))
    watches = property(attrgetter("importance.watches"))

    def __init__(self, importance: str | Importance) -> None:
        self.importance = resolve(importance)
        if self.importance.by_layer:
            raise MooringError(
                f"Balanced rescales scores, and {self.importance.name}() keeps factors: balance EWC() or MAS() instead"
            )
        self.seed = self.importance.seed

    def __repr__(self) -> str:
        return f"Balanced({self.importance!r})"

    @property
    def name(self) -> str:
        """Balanced(...) with the name of the inner importance."""
        return f"Balanced({self.importance.name})"

    def start(self, like: Tensor, *, name: str, task: int) -> State:
        """See the inner importance."""
        return self.importance.start(like, name=name, task=task)

    def update(self, state: State, it: Iteration) -> None:
        """See the inner importance."""
        self.importance.update(state, it)

    def averaged(self) -> "Balanced":
        """See the inner importance."""
        return Balanced(self.importance.averaged())

    def probe(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """See the inner importance."""
        return self.importance.probe(outputs, generator)

    def factors(self, sums: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Return `balance` of the layers."""
        return balance(sums, sizes)
