"""What is measured of a stack of runs: finite or not, and how far it went from the first task's model."""

from collections.abc import Collection, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from mooring.diagnose.drift import cka, drift_by_layer, gram, likeness
from mooring.lab.fleet.stack.stack import Stack
from mooring.state.selection import layer_of

__all__ = ["drift_of", "finite_runs", "likeness_of"]

Tensors = dict[str, Tensor]

AT_ONCE = {"cpu": 1, "cuda": 1 << 24}
"""How many values of inputs to look at. On a CPU runs go one by one: no slower, and each as it would be alone."""


def finite_runs(tensors: Sequence[Tensor]) -> Tensor:
    """For each run, whether every value of every tensor is finite; bool of shape (runs,).

    Args:
        tensors: each of shape (runs, ...).

    Example:
        >>> finite_runs([torch.tensor([[1.0, 2.0], [1.0, float("nan")]])])
        tensor([ True, False])
    """
    sums = [tensor.sum(tuple(range(1, tensor.ndim))) if tensor.ndim > 1 else tensor for tensor in tensors]
    fine = torch.stack(sums).isfinite().all(0)
    if bool(fine.all()):
        return fine
    flat = [tensor.reshape(len(tensor), -1) for tensor in tensors]  # a sum may overflow
    return torch.stack([each.isfinite().all(1) for each in flat]).all(0)


def drift_of(stack: Stack, first: Tensors) -> list[dict[str, float]]:
    """How far the layers of each run's backbone are from where they were after the first task.

    Args:
        stack: the runs.
        first: the stack's parameters and buffers after the first task.
    """
    names = [name for name in stack.parameters if name.startswith("backbone.")]
    if not names:
        return [{} for _ in range(len(stack))]
    squares = torch.stack([_squares(stack.parameters[name].detach(), first[name]) for name in names], 1)
    return [drift_by_layer(zip(names, mine, strict=True)) for mine in squares.tolist()]


def _squares(theta: Tensor, anchor: Tensor) -> Tensor:
    """||theta - anchor||^2 and ||anchor||^2 of each run, of shape (runs, 2); some runs at a time."""
    found = []
    for now, then in zip(torch.split(theta, 64), torch.split(anchor, 64), strict=True):
        wide = then.double()
        both = ((now.double() - wide).square(), wide.square())
        found.append(torch.stack([each.reshape(len(each), -1).sum(1) for each in both], 1))
    return torch.cat(found)


@torch.no_grad()
def likeness_of(stack: Stack, first: Tensors, inputs: Tensor) -> list[dict[str, float]]:
    """CKA of the layers of each run's backbone with themselves after the first task, in the arithmetic of training.

    Args:
        stack: the runs.
        first: the stack's parameters and buffers after the first task.
        inputs: what to compare representations on; there is none for fewer than 4.
    """
    owners = dict.fromkeys(layer_of(name) for name in stack.parameters if name.startswith("backbone."))
    if not owners or len(inputs) < 4:
        return [{} for _ in range(len(stack))]
    if stack.way != "wide":
        return _one_by_one(stack, first, inputs, owners)
    now = stack.parameters | stack.buffers
    some = max(1, AT_ONCE[stack.device.type] // inputs.numel())
    parts: list[dict[str, Tensor]] = []
    for begin in range(0, len(stack), some):
        rows = slice(begin, begin + some)
        k, m = (_grams(stack, {name: t.detach()[rows] for name, t in told.items()}, inputs) for told in (first, now))
        parts.append({layer: likeness(k[layer], m[layer]) for layer in owners if layer in k})  # some never run
    found = {layer: torch.cat([part[layer] for part in parts]) for layer in parts[0]}
    values = torch.stack(list(found.values()), 1).tolist()
    return [dict(zip(found, mine, strict=True)) for mine in values]


def _one_by_one(stack: Stack, first: Tensors, inputs: Tensor, layers: Collection[str]) -> list[dict[str, float]]:
    """The same, one network after the other."""
    then, now = deepcopy(stack.network), deepcopy(stack.network)
    found = []
    for run in range(len(stack)):
        stack.fill(then, run, first)
        stack.fill(now, run)
        found.append({layer: value for layer, value in cka(then, now, inputs).items() if layer in layers})
    return found


def _grams(stack: Stack, weights: Tensors, inputs: Tensor) -> Tensors:
    """What each layer gives for the inputs, every one with every other: of shape (runs, inputs, inputs)."""
    found: Tensors = {}

    def look(name: str, out: Any, runs: int) -> None:
        out = out[0] if isinstance(out, tuple | list) else out
        wide = torch.promote_types(out.dtype, torch.float32)
        found[name] = gram(out.detach().to(wide).view(runs, len(inputs), *out.shape[1:]), 1)

    with stack.showing(weights, look):
        stack(inputs.expand(len(stack), *inputs.shape), 0)
    return found
