"""Sees what goes through the layers of a stack, for the Kronecker factors of every run's curvature."""

import torch
from torch import Tensor, nn

from mooring.errors import MooringError
from mooring.importance.kronecker_factors import Factors, kronecker_factors, layers_with_factors, over_uses
from mooring.lab.fleet.stack.batched_layers import Wide
from mooring.lab.fleet.stack.stack import Stack

__all__ = ["StackWatch"]


class StackWatch:
    """Watches the layers of a stack that runs wide.

    Args:
        stack: whose.
        every: look in each `every`-th step of a task only.
        largest: layers with more inputs or outputs are not watched.

    Attributes:
        on: whether to look at the forward passes that come.
        seen: what came back since it was last taken.
        parameters: the names of those whose layers are watched.

    Raises:
        MooringError: where the stack does not run wide.
    """

    def __init__(self, stack: Stack, every: int, largest: int) -> None:
        self.every, self.on = every, False
        self.seen: dict[str, list[Factors]] = {}
        self.parameters: list[str] = []
        if stack.wide is None or stack.way != "wide":
            raise MooringError(
                "a method with Kronecker factors needs layers that know about runs, and this network has others: "
                "compare it without, or train it alone with mooring.attach"
            )
        with_factors = layers_with_factors(stack.network, largest)
        covered = {name: layer for name, layer in stack.network.named_modules() if layer in with_factors}
        for name, module in _wide_layers(stack.wide):
            if name in covered:
                self.parameters += [f"{name}.{short}" for short in with_factors[covered[name]]]
                module.watcher = lambda layer, a, out, runs, name=name: self._look(name, layer, a, out, runs)

    def _look(self, name: str, layer: nn.Module, a: Tensor, out: Tensor, runs: int) -> None:
        """Wait for the gradient of what came out."""
        if not self.on or not out.requires_grad:
            return
        a = a.detach()

        def arrived(b: Tensor) -> None:
            with torch.no_grad():
                self.seen.setdefault(name, []).append(kronecker_factors(layer, a, b, runs))

        out.register_hook(arrived)  # type: ignore[no-untyped-call]

    def begin(self, step: int) -> bool:
        """Whether that step of a task is looked at; from here on it is, or not."""
        self.on = step % self.every == 0
        return self.on

    def take(self) -> dict[str, Factors]:
        """What was seen, by layer, each factor behind a run axis; from here on anew."""
        seen, self.seen = self.seen, {}
        return {name: over_uses(uses) for name, uses in seen.items()}


def _wide_layers(network: nn.Module) -> list[tuple[str, Wide]]:
    """The layers that know about runs, by the names they have in one network."""
    return [(module.name, module) for module in network.modules() if isinstance(module, Wide)]
