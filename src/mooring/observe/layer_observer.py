"""Sees what goes into layers and what comes back to their outputs, for the Kronecker factors of their curvature."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from mooring.distributed.collectives import factors_over_ranks, world_size
from mooring.errors import MooringError
from mooring.importance.kronecker_factors import Factors, kronecker_factors, layers_with_factors, over_passes, over_uses
from mooring.observe.forward_hook import ForwardHook
from mooring.observe.output_observer import OutputObserver
from mooring.state.mooring_state import MooringState

__all__ = ["LayerObserver", "watches"]


class LayerObserver:
    """Hooks on layers that see what goes in and what comes back; it counts when the optimizer steps.

    Args:
        layers: which.
        every: look in each `every`-th iteration only.
        step: how many iterations there were in this task.
        predictions: how many predictions this rank's mean loss is over in this iteration; None where a sample is one.

    Attributes:
        samples: how many went into a layer in the last iteration that it was looked at in; of one rank alone.
    """

    def __init__(
        self,
        layers: Iterable[nn.Module],
        every: int,
        step: Callable[[], int],
        predictions: Callable[[], float] | None = None,
    ) -> None:
        self.every, self.step, self.predictions, self.paused = every, step, predictions, False
        self.samples = 0
        self.seen: dict[nn.Module, dict[int, tuple[int, list[Factors]]]] = {}
        self.layers = list(layers)
        self._handles = [layer.register_forward_hook(ForwardHook(self)) for layer in self.layers]

    def after_forward(self, module: nn.Module, args: Any, returned: Any) -> None:
        """Wait for the gradient of what came out."""
        if self.paused or OutputObserver.looking or not torch.is_grad_enabled() or self.step() % self.every:
            return
        if not args or not isinstance(returned, Tensor) or not returned.requires_grad:
            return
        a: Tensor = args[0].detach()

        def arrived(b: Tensor) -> None:
            if b.dtype == torch.float16:
                raise MooringError(
                    "a gradient in float16 is scaled, and Kronecker() cannot know by how much: use bfloat16, or "
                    'importance="ewc"'
                )
            if not OutputObserver.looking:
                number = torch._C._current_graph_task_id()
                _, uses = self.seen.setdefault(module, {}).setdefault(number, (len(a), []))
                with torch.no_grad():
                    uses.append(kronecker_factors(module, a, b))

        returned.register_hook(arrived)  # type: ignore[no-untyped-call]

    def take(self) -> list[tuple[nn.Module, Factors]]:
        """What was seen since the last step, over all passes and ranks together; a new iteration begins.

        A sample may hold several predictions, as the positions of a sequence are: the loss is a mean over those, and
        the gradient of a single one so many times as large.
        """
        seen, self.seen = self.seen, {}
        if self.step() % self.every:
            return []
        found = {}
        for layer, passes in seen.items():
            every, samples = [over_uses(uses) for _, uses in passes.values()], [n for n, _ in passes.values()]
            a, g, sums = over_passes(every, samples)
            each = (self.predictions() if self.predictions else 0) / sum(samples) or 1.0
            found[layer] = sum(samples), (a, g * each, sums * each)
        if found and world_size() == 1:
            self.samples = min(samples for samples, _ in found.values())
        return factors_over_ranks(self.layers, found)

    def remove(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()


def watches(
    states: MooringState, outputs: Callable[[Any], Tensor] | None = None
) -> tuple[OutputObserver | None, LayerObserver | None]:
    """Who watches the model for an importance: its outputs or samples, and its layers, where it needs them."""
    importance = states.importance
    watch = None if importance.watches == "nothing" else OutputObserver(states.model, importance, states, outputs)
    if not importance.by_layer:
        return watch, None
    batch = getattr(importance, "batch_size", None)

    def predictions() -> float:
        return batch / world_size() if batch else (watch.seen.samples if watch else 0)

    layers = layers_with_factors(states.model, states.importance.largest)
    return watch, LayerObserver(layers, importance.every, lambda: states.steps, predictions)
