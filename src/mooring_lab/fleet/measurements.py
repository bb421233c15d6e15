"""Measurements of a stack of runs: finite values, and drift and CKA against the model after the first task."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mooring.diagnose.drift import cka, drift_by_layer, gram, likeness
from mooring.state.selection import layer_of
from mooring_lab.fleet.method_state import rows_of
from mooring_lab.fleet.stack.stack import Stack

Tensors = dict[str, Tensor]

INPUT_VALUES_PER_PASS = {"cpu": 1, "cuda": 1 << 24}
"""Number of input values that CKA compares at a time. A CPU takes one run at a time: it is no slower, and each run
gets exactly the value that it gets alone."""

RUNS_PER_PASS = 64
"""Number of runs whose parameters are converted to float64 at a time."""


def finite_runs(tensors: Sequence[Tensor]) -> Tensor:
    """Return whether every value of every tensor is finite, for each run: bool of shape (runs,).

    Args:
        tensors: each of shape (runs, ...).

    Example:
        >>> finite_runs([torch.tensor([[1.0, 2.0], [1.0, float("nan")]])])
        tensor([ True, False])
    """
    sums = [tensor.sum(tuple(range(1, tensor.ndim))) if tensor.ndim > 1 else tensor for tensor in tensors]
    finite = torch.stack(sums).isfinite().all(0)
    if bool(finite.all()):
        return finite
    # a sum of finite values may overflow
    return torch.stack([tensor.reshape(len(tensor), -1).isfinite().all(1) for tensor in tensors]).all(0)


def drift_of(stack: Stack, first: Tensors) -> list[dict[str, float]]:
    """Return the drift of each backbone layer since the first task, for each run.

    Args:
        stack: the runs.
        first: the stack's parameters and buffers after the first task.
    """
    names = [name for name in stack.parameters if name.startswith("backbone.")]
    if not names:
        return [{} for _ in range(len(stack))]
    squares = torch.stack([_squares(stack.parameters[name].detach(), first[name]) for name in names], 1)
    return [drift_by_layer(zip(names, row, strict=True)) for row in squares.tolist()]


def _squares(theta: Tensor, anchor: Tensor) -> Tensor:
    """Compute ||theta - anchor||^2 and ||anchor||^2 of each run, of shape (runs, 2)."""
    parts = []
    for now, then in zip(torch.split(theta, RUNS_PER_PASS), torch.split(anchor, RUNS_PER_PASS), strict=True):
        exact = then.double()
        squares = ((now.double() - exact).square(), exact.square())
        parts.append(torch.stack([square.reshape(len(square), -1).sum(1) for square in squares], 1))
    return torch.cat(parts)


@torch.no_grad()
def cka_of(stack: Stack, first: Tensors, inputs: Tensor) -> list[dict[str, float]]:
    """Return the CKA of each backbone layer with itself after the first task, for each run, in the training precision.

    Args:
        stack: the runs.
        first: the stack's parameters and buffers after the first task.
        inputs: the inputs of the comparison; with fewer than 4 the result is empty.
    """
    layers = dict.fromkeys(layer_of(name) for name in stack.parameters if name.startswith("backbone."))
    if not layers or len(inputs) < 4:
        return [{} for _ in range(len(stack))]
    if stack.mode != "batched":
        pairs = ((stack.network_of(run, first), stack.network_of(run)) for run in range(len(stack)))
        return [{layer: value for layer, value in cka(*pair, inputs).items() if layer in layers} for pair in pairs]
    now = stack.parameters | stack.buffers
    runs = max(1, INPUT_VALUES_PER_PASS[stack.device.type] // inputs.numel())
    parts: list[Tensors] = []
    for begin in range(0, len(stack), runs):
        rows = slice(begin, begin + runs)
        k, m = (_grams(stack, rows_of(tensors, rows), inputs) for tensors in (first, now))
        parts.append({layer: likeness(k[layer], m[layer]) for layer in layers if layer in k})  # some layers never run
    values = {layer: torch.cat([part[layer] for part in parts]) for layer in parts[0]}
    return [dict(zip(values, row, strict=True)) for row in torch.stack(list(values.values()), 1).tolist()]


def _grams(stack: Stack, weights: Tensors, inputs: Tensor) -> Tensors:
    """Compute the Gram matrix of each layer's outputs, of shape (runs, inputs, inputs)."""
    grams: Tensors = {}

    def add_gram(name: str, layer: nn.Module, x: Tensor, out: Any, runs: int) -> None:
        out = out[0] if isinstance(out, tuple | list) else out
        compute_dtype = torch.promote_types(out.dtype, torch.float32)
        grams[name] = gram(out.detach().to(compute_dtype).view(runs, len(inputs), *out.shape[1:]), 1)

    with stack.observed_with(weights, add_gram):
        stack(inputs.expand(len(stack), *inputs.shape), 0)
    return grams
