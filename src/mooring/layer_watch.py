"""Sees what goes into layers and what comes back to their outputs, for the Kronecker factors of their curvature."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from mooring.errors import MooringError
from mooring.factors import Factors, kronecker_factors, over_passes, over_uses
from mooring.forward_hook import ForwardHook, ranks
from mooring.watch import Watch

__all__ = ["LayerWatch"]


class LayerWatch:
    """Hooks on layers that see what goes in and what comes back; it counts when the optimizer steps.

    Args:
        layers: which.
        every: look in each `every`-th iteration only.
        step: how many iterations there were in this task.
    """

    def __init__(self, layers: Iterable[nn.Module], every: int, step: Callable[[], int]) -> None:
        self.every, self.step = every, step
        self.seen: dict[nn.Module, dict[int, tuple[int, list[Factors]]]] = {}
        self._handles = [layer.register_forward_hook(ForwardHook(self)) for layer in layers]

    def after_forward(self, module: nn.Module, args: Any, returned: Any) -> None:
        """Wait for the gradient of what came out."""
        if Watch.looking or not torch.is_grad_enabled() or self.step() % self.every:
            return
        if not args or not isinstance(returned, Tensor) or not returned.requires_grad:
            return
        a: Tensor = args[0].detach()

        def arrived(b: Tensor) -> None:
            if not Watch.looking:
                number = torch._C._current_graph_task_id()
                _, uses = self.seen.setdefault(module, {}).setdefault(number, (len(a), []))
                with torch.no_grad():
                    uses.append(kronecker_factors(module, a, b))

        returned.register_hook(arrived)  # type: ignore[no-untyped-call]

    def take(self) -> list[tuple[nn.Module, Factors]]:
        """What was seen since the last step, over all passes together; a new iteration begins."""
        if ranks() > 1:
            raise MooringError(
                "Kronecker would see the layers of one rank only: under torch.distributed use EWC(per_sample=True), "
                "with a batch_size"
            )
        seen, self.seen = self.seen, {}
        found = []
        for layer, passes in seen.items():
            every = [over_uses(uses) for _, uses in passes.values()]
            found.append((layer, over_passes(every, [samples for samples, _ in passes.values()])))
        return found

    def remove(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()
