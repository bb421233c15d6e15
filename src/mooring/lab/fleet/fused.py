"""Optimizer, importance and pull of a method as one compiled kernel per parameter, for a GPU."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mooring.importance import Iteration, State
from mooring.lab.fleet.groups import Groups, rows_of
from mooring.lab.fleet.moorings import Moorings, Tensors
from mooring.lab.fleet.sgd import SGD
from mooring.pulls import GradientPull, ParameterPull
from mooring.runs import per_run

__all__ = ["Fused", "flat", "fused_for"]


class Fused:
    """What happens to the parameters of some runs between two gradients, in one pass over memory.

    The order is that of `Moorings` and the rules are the core's own; the compiler joins them.

    Args:
        moorings: of the runs; None where nothing is moored.
        sgd: of the whole fleet.
    """

    def __init__(self, moorings: Moorings | None, sgd: SGD) -> None:
        self.moorings, self.sgd = moorings, sgd
        _compile_for_each_method()
        self.compiled: Callable[..., None] = torch.compile(self._move, dynamic=True)

    @torch.no_grad()
    def advance(self, rows: slice, parameters: Tensors, gradients: Tensors, probes: Tensors, samples: int) -> None:
        """Move every parameter that has a gradient, update its importance, pull it back.

        Args:
            rows: the runs, as rows of the whole stack.
            parameters: of the whole stack; changed in place.
            gradients: of the task's loss, of the whole stack.
            probes: the gradients of the importance's own function of the outputs.
            samples: in the batch.
        """
        moorings = self.moorings
        if moorings is not None:
            moorings.adopt(rows_of(parameters, rows), gradients)
            moorings.steps += 1
        for name, g in gradients.items():
            if name not in self.sgd.velocity:
                self.sgd.velocity[name] = torch.zeros_like(g)
            moved = [flat(t)[rows] for t in (parameters[name].detach(), g, self.sgd.velocity[name])]
            lr = self.sgd.lr[rows]
            held = None if moorings is None else moorings.held.get(name)
            if moorings is None or held is None:
                self.compiled(*moved, lr, None, None, None, None, 0, 0)
                continue
            counts = moorings.importance.watches != "outputs" or name in probes
            held.count += counts
            previous = None if held.previous is None else flat(held.previous)
            state = {slot: flat(tensor) for slot, tensor in held.state.items()} if counts else None
            probe = flat(probes[name])[rows] if name in probes else None
            self.compiled(*moved, lr, flat(held.anchor), previous, state, probe, samples, held.count)

    def _move(
        self,
        theta: Tensor,
        g: Tensor,
        velocity: Tensor,
        lr: Tensor,
        anchor: Tensor | None,
        previous: Tensor | None,
        state: State | None,
        probe: Tensor | None,
        samples: int,
        count: int,
    ) -> None:
        """One parameter of some runs, each tensor of shape (runs, elements)."""
        load, moorings = g, self.moorings
        pull = None if moorings is None or previous is None else moorings.pull
        if isinstance(pull, GradientPull) and anchor is not None and previous is not None:
            load = g + pull.force(previous, theta - anchor, lr)
        if self.sgd.weight_decay:
            load = load + self.sgd.weight_decay * theta
        velocity.mul_(self.sgd.momentum).add_(load)
        before = theta.clone()
        theta.sub_(per_run(lr, velocity) * velocity)
        if moorings is None or anchor is None or state is None:
            return
        seen: Any = Iteration(g, theta, anchor, before, probe, samples, count)
        moorings.importance.update(state, seen)
        if isinstance(pull, ParameterPull) and previous is not None:
            theta.lerp_(anchor, pull.rate(previous, state["current"], lr))


def fused_for(groups: Groups, sgd: SGD) -> list[Fused]:
    """A compiled update for each group; none at all where one cannot be: in float64, or where scores are balanced."""
    whole = any(moorings.importance.balances for _, moorings in groups.moored)
    sparse = any(getattr(moorings.pull, "every", 1) > 1 for _, moorings in groups.moored)
    if whole or sparse or sgd.lr.dtype == torch.float64:
        return []
    return [Fused(moorings, sgd) for _, moorings in groups.every]


def _compile_for_each_method() -> None:
    """Every method is compiled in a few forms; the compiler gives up after eight of one function otherwise."""
    settings = torch._dynamo.config
    for name in ("recompile_limit", "cache_size_limit"):  # the newer name, and the older
        if hasattr(settings, name):
            setattr(settings, name, max(512, getattr(settings, name)))
            return


def flat(tensor: Tensor) -> Tensor:
    """(runs, ...) as (runs, elements) in the order of memory, where kernels have their channels last.

    Example:
        >>> flat(torch.zeros(2, 3, 4)).shape
        torch.Size([2, 12])
    """
    if tensor.ndim == 5:
        tensor = tensor.permute(0, 1, 3, 4, 2)
    return tensor.reshape(len(tensor), -1)
