"""What is measured of a stack of runs: finite or not, and how far it went from the first task's model."""

from collections.abc import Iterator, Sequence
from copy import deepcopy

import torch
from torch import Tensor

from mooring.drift import cka, cka_of_batch, parameter_drift
from mooring.lab.fleet.precision import computing
from mooring.lab.fleet.recording import Recorder
from mooring.lab.fleet.stack import Stack

__all__ = ["by_layer", "finite_runs"]


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


def by_layer(
    stack: Stack, first: dict[str, Tensor], inputs: Tensor
) -> Iterator[tuple[dict[str, float], dict[str, float]]]:
    """How far each run's backbone is from what it was after the first task: drift and CKA by layer.

    Args:
        stack: the runs.
        first: the stack's parameters and buffers after the first task.
        inputs: what to compare representations on; CKA is left out for fewer than 4.
    """
    names = [name for name in stack.parameters if name.startswith("backbone.")]
    likenesses = _likenesses(stack, first, inputs) if names and len(inputs) >= 4 else [{}] * len(stack)
    for run, likeness in enumerate(likenesses):
        drift = parameter_drift((name, stack.parameters[name].detach()[run], first[name][run]) for name in names)
        yield drift, {layer: likeness[layer] for layer in drift if layer in likeness}  # some never run as modules


def _likenesses(stack: Stack, first: dict[str, Tensor], inputs: Tensor) -> list[dict[str, float]]:
    """CKA of every layer of each run with itself after the first task; on a GPU recorded with the first runs."""
    then, now = deepcopy(stack.network), deepcopy(stack.network)
    recorder, found = Recorder(on=inputs.is_cuda), list[dict[str, float]]()
    kept: dict[str, Tensor] = {}

    def compare() -> None:
        for layer, value in cka_of_batch(then, now, inputs).items():
            kept[layer] = kept[layer].copy_(value) if layer in kept else value

    with computing("float32"):
        for run in range(len(stack)):
            stack.fill(then, run, first)
            stack.fill(now, run)
            if inputs.is_cuda:
                recorder.run("compare", len(stack) - run, compare)
                found.append(dict(zip(kept, torch.stack(list(kept.values())).tolist(), strict=True)))
            else:
                found.append(cka(then, now, inputs))
    return found
