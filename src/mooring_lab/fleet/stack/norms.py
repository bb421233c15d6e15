"""Normalization layers of a whole stack of networks."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from mooring_lab.fleet.gpu.batch_norm import fused_batch_norm, supports_batch_norm

Tensors = Mapping[str, Tensor]

MIN_VALUES_FOR_RUN_LOOP = 1 << 14
"""From this many values per run on, a CPU is faster with one run after the other than with transposing the runs."""


def batch_norm(layer: nn.Module, x: Tensor, tensors: Tensors, runs: int) -> Tensor:
    """Apply the batch norm of every run to its own samples; x of shape (runs * batch, channels, ...)."""
    assert isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d)
    training = layer.training or "running_mean" not in tensors
    names = ("running_mean", "running_var", "weight", "bias")
    momentum = 0.0 if layer.momentum is None else layer.momentum
    mean, var, weight, bias = (tensors.get(name) for name in names)
    if supports_batch_norm(x):
        running = None if mean is None or var is None else (mean, var, tensors["num_batches_tracked"])
        return fused_batch_norm(x, weight, bias, running, runs, training=training, momentum=momentum, eps=layer.eps)
    if layer.training and "num_batches_tracked" in tensors:
        tensors["num_batches_tracked"].add_(1)
    if x.device.type == "cpu" and x.numel() >= MIN_VALUES_FOR_RUN_LOOP * runs > MIN_VALUES_FOR_RUN_LOOP:
        by_run = [tensors[name].unbind() if name in tensors else [None] * runs for name in names]
        parts = zip(x.chunk(runs), *by_run, strict=True)
        return torch.cat(
            [functional.batch_norm(p, m, v, w, b, training, momentum, layer.eps) for p, m, v, w, b in parts]
        )
    mean, var, weight, bias = (None if tensor is None else tensor.flatten() for tensor in (mean, var, weight, bias))
    out = functional.batch_norm(runs_to_channels(x, runs), mean, var, weight, bias, training, momentum, layer.eps)
    return runs_to_batch(out, runs)


def layer_norm(layer: nn.Module, x: Tensor, tensors: Tensors, runs: int) -> Tensor:
    """Apply the layer norm of every run; x of shape (runs * batch, ..., *normalized_shape)."""
    assert isinstance(layer, nn.LayerNorm)
    rows = functional.layer_norm(x, layer.normalized_shape, eps=layer.eps).view(runs, -1, *layer.normalized_shape)
    return _affine(rows, tensors).view(x.shape)


def group_norm(layer: nn.Module, x: Tensor, tensors: Tensors, runs: int) -> Tensor:
    """Apply the group norm of every run; x of shape (runs * batch, channels, ...)."""
    assert isinstance(layer, nn.GroupNorm)
    rows = functional.group_norm(x, layer.num_groups, eps=layer.eps)
    return _affine(rows.reshape(runs, len(x) // runs, layer.num_channels, -1), tensors).view(x.shape)


def instance_norm(layer: nn.Module, x: Tensor, tensors: Tensors, runs: int) -> Tensor:
    """Apply the instance norm of every run; x of shape (runs * batch, channels, height, width)."""
    assert isinstance(layer, nn.InstanceNorm2d)
    if "running_mean" in tensors or x.ndim != 4:
        raise NotImplementedError("an instance norm with running statistics or of one sample cannot be batched")
    rows = functional.instance_norm(x, eps=layer.eps)
    return _affine(rows.reshape(runs, len(x) // runs, layer.num_features, -1), tensors).view(x.shape)


def _affine(rows: Tensor, tensors: Tensors) -> Tensor:
    """Compute rows * weight + bias: rows (runs, batch, *shape, ...), weight and bias (runs, *shape), if given."""
    factors = {name: tensor.to(rows.dtype).unsqueeze(1) for name, tensor in tensors.items()}
    factors = {name: tensor.view(*tensor.shape, *[1] * (rows.ndim - tensor.ndim)) for name, tensor in factors.items()}
    if "bias" in factors:
        return torch.addcmul(factors["bias"], rows, factors["weight"])
    return rows * factors["weight"] if factors else rows


def runs_to_channels(x: Tensor, runs: int) -> Tensor:
    """Rearrange (runs * batch, channels, ...) to (batch, runs * channels, ...).

    Example:
        >>> runs_to_channels(torch.zeros(2 * 5, 3, 8, 8), runs=2).shape
        torch.Size([5, 6, 8, 8])
    """
    return x.reshape(runs, -1, *x.shape[1:]).transpose(0, 1).flatten(1, 2)


def runs_to_batch(x: Tensor, runs: int) -> Tensor:
    """Rearrange (batch, runs * channels, ...) to (runs * batch, channels, ...).

    Example:
        >>> runs_to_batch(torch.zeros(5, 6, 8, 8), runs=2).shape
        torch.Size([10, 3, 8, 8])
    """
    return x.reshape(x.shape[0], runs, -1, *x.shape[2:]).transpose(0, 1).flatten(0, 1)
