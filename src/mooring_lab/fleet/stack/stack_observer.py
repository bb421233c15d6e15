"""An observer of the layers of a stack, for the Kronecker factors of every run's curvature."""

import torch
from torch import Tensor, nn

from mooring.curvature.kronecker_factors import (
    LayerFactors,
    batch_factors,
    combine_uses,
    layer_groups,
    layers_with_factors,
)
from mooring.errors import MooringError
from mooring_lab.fleet.stack.batched_layers import BatchedLayer
from mooring_lab.fleet.stack.stack import Stack


class StackObserver:
    """An observer of the layers of a stack that runs in "batched" mode.

    Args:
        stack: the stack.
        interval: observe every `interval`-th step of a task.
        max_size: layers with more inputs or outputs are not observed.

    Attributes:
        enabled: whether the next forward pass is observed.
        observations: the factors observed since the last `take`, by layer, one entry for each use of the layer.
        parameters: the names of the parameters whose layers are observed, with the number of groups of their factors.

    Raises:
        MooringError: if the stack runs in another mode.
    """

    def __init__(self, stack: Stack, interval: int, max_size: int) -> None:
        self.interval, self.enabled = interval, False
        self.observations: dict[str, list[LayerFactors]] = {}
        self.parameters: dict[str, int] = {}
        if stack.batched is None or stack.mode != "batched":
            raise MooringError(
                "a method with Kronecker factors needs layers that can be batched over runs, and this network has "
                "others: compare it without this method, or train it alone with mooring.attach"
            )
        with_factors = layers_with_factors(stack.network, max_size)
        covered = {name: layer for name, layer in stack.network.named_modules() if layer in with_factors}
        for module in stack.batched.modules():
            if isinstance(module, BatchedLayer) and module.name in covered:
                layer = covered[module.name]
                for short in with_factors[layer]:
                    self.parameters[f"{module.name}.{short}"] = layer_groups(layer) if short == "weight" else 1
                module.on_forward = self._observe

    def _observe(self, name: str, layer: nn.Module, x: Tensor, out: Tensor, runs: int) -> None:
        """Compute the layer's factors once the gradient of its output is known."""
        if not self.enabled or not out.requires_grad:
            return
        x = x.detach()

        def on_gradient(g: Tensor) -> None:
            with torch.no_grad():
                self.observations.setdefault(name, []).append(batch_factors(layer, x, g, runs))

        out.register_hook(on_gradient)  # type: ignore[no-untyped-call]

    def start_step(self, step: int) -> bool:
        """Enable or disable the observer for a step of the task, and return whether it is enabled."""
        self.enabled = step % self.interval == 0
        return self.enabled

    def take(self) -> dict[str, LayerFactors]:
        """Return the factors observed so far, by layer, each with a leading run axis, and forget them."""
        observations, self.observations = self.observations, {}
        return {name: combine_uses(uses) for name, uses in observations.items()}

    def keep(self, rows: Tensor) -> None:
        """Keep the runs in these rows of what was observed and not taken."""
        for name, uses in self.observations.items():
            self.observations[name] = [(a[rows], g[rows], sums[rows]) for a, g, sums in uses]
