"""Observes the inputs of layers and the gradients of their outputs, for the Kronecker factors of their curvature."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from mooring.backends.eager import autocast_disabled
from mooring.distributed.collectives import all_reduce_factors, world_size
from mooring.errors import MooringError
from mooring.importance import kronecker_factors
from mooring.importance.kronecker_factors import LayerFactors
from mooring.observe.output_observer import ForwardHook, OutputObserver
from mooring.state.mooring_state import MooringState


class LayerObserver:
    """Forward hooks on layers that compute Kronecker factors in each backward pass.

    Args:
        layers: the layers to observe.
        every: observe only each `every`-th iteration.
        step: returns the number of iterations so far in this task.
        predictions: returns the number of predictions that this rank's mean loss averages over in this iteration;
            None if each sample is one prediction.

    Attributes:
        samples: the number of samples in the last observed iteration; set in a single process only.
    """

    def __init__(
        self,
        layers: Iterable[nn.Module],
        every: int,
        step: Callable[[], int],
        predictions: Callable[[], float] | None = None,
    ) -> None:
        self.every, self.step, self.predictions, self.paused = every, step, predictions, False
        self.samples, self.layers = 0, list(layers)
        self._passes: dict[nn.Module, dict[int, tuple[int, list[LayerFactors]]]] = {}
        self._handles = [layer.register_forward_hook(ForwardHook(self.after_forward)) for layer in self.layers]

    def after_forward(self, module: nn.Module, args: Any, returned: Any) -> None:
        """Register a hook on the output that computes the factors when its gradient arrives."""
        if self.paused or OutputObserver.probing or not torch.is_grad_enabled() or self.step() % self.every:
            return
        if not args or not isinstance(returned, Tensor) or not returned.requires_grad:
            return
        a: Tensor = args[0].detach()

        def on_gradient(b: Tensor) -> None:
            if b.dtype == torch.float16:
                raise MooringError(
                    "Kronecker() does not support float16, whose gradients are scaled by an unknown factor: use "
                    'bfloat16 or importance="ewc"'
                )
            if not OutputObserver.probing:
                backward_pass = torch._C._current_graph_task_id()
                _, uses = self._passes.setdefault(module, {}).setdefault(backward_pass, (len(a), []))
                with torch.no_grad(), autocast_disabled():
                    uses.append(kronecker_factors.batch_factors(module, a, b))

        returned.register_hook(on_gradient)  # type: ignore[no-untyped-call]

    def collect(self) -> list[tuple[nn.Module, LayerFactors]]:
        """Return the factors since the last step over all passes and ranks, and start a new iteration.

        A sample may hold several predictions, such as the positions of a sequence. The loss is then a mean over
        predictions, so the gradient of a single one is larger by their number per sample.
        """
        observed, self._passes = self._passes, {}
        if self.step() % self.every:
            return []
        factors = {}
        for layer, passes in observed.items():
            by_pass = [kronecker_factors.combine_uses(uses) for _, uses in passes.values()]
            samples = [n for n, _ in passes.values()]
            a, g, sums = kronecker_factors.combine_passes(by_pass, samples)
            per_sample = (self.predictions() if self.predictions else 0) / sum(samples) or 1.0
            factors[layer] = sum(samples), (a, g * per_sample, sums * per_sample)
        if factors and world_size() == 1:
            self.samples = min(samples for samples, _ in factors.values())
        return all_reduce_factors(self.layers, factors)

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


def make_observers(
    states: MooringState, outputs: Callable[[Any], Tensor] | None = None
) -> tuple[OutputObserver | None, LayerObserver | None]:
    """Create the observers of outputs and of layers that an importance needs; None for each that it does not need."""
    importance = states.importance
    watches = importance.watches != "nothing"
    output_observer = OutputObserver(states.model, importance, states, outputs) if watches else None
    if not importance.by_layer:
        return output_observer, None
    batch_size = getattr(importance, "batch_size", None)

    def predictions() -> float:
        if batch_size:
            return float(batch_size) / world_size()
        return output_observer.observation.samples if output_observer else 0

    layers = kronecker_factors.layers_with_factors(states.model, importance.largest)
    return output_observer, LayerObserver(layers, importance.every, lambda: states.steps, predictions)
