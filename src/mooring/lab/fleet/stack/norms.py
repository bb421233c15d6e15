"""Norms of a whole stack of networks: statistics of each sample or each run, scaled and shifted by each run's own."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from mooring.lab.fleet.gpu.batch_norm import normalised, takes_norm

__all__ = ["batch_norm", "by_channel", "by_run", "group_norm", "instance_norm", "layer_norm"]

Tensors = Mapping[str, Tensor]

LARGE = 1 << 14
"""From so many values of a run on, a CPU is faster at one run after the other than at moving the runs about."""


def batch_norm(layer: nn.Module, x: Tensor, own: Tensors, runs: int) -> Tensor:
    """All runs of a batch norm, each over its own samples; x of shape (runs * batch, channels, ...)."""
    assert isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d)
    training = layer.training or "running_mean" not in own
    names = ("running_mean", "running_var", "weight", "bias")
    momentum = 0.0 if layer.momentum is None else layer.momentum
    mean, var, weight, bias = (own.get(name) for name in names)
    if takes_norm(x):
        running = None if mean is None or var is None else (mean, var, own["num_batches_tracked"])
        return normalised(x, weight, bias, running, runs, training=training, momentum=momentum, eps=layer.eps)
    if layer.training and "num_batches_tracked" in own:
        own["num_batches_tracked"].add_(1)
    if x.device.type == "cpu" and x.numel() >= LARGE * runs > LARGE:
        each = [own[name].unbind() if name in own else [None] * runs for name in names]
        parts = zip(x.chunk(runs), *each, strict=True)
        return torch.cat(
            [functional.batch_norm(p, m, v, w, b, training, momentum, layer.eps) for p, m, v, w, b in parts]
        )
    mean, var, weight, bias = (None if each is None else each.flatten() for each in (mean, var, weight, bias))
    out = functional.batch_norm(by_channel(x, runs), mean, var, weight, bias, training, momentum, layer.eps)
    return by_run(out, runs)


def layer_norm(layer: nn.Module, x: Tensor, own: Tensors, runs: int) -> Tensor:
    """All runs of a layer norm; x of shape (runs * batch, ..., *normalized_shape)."""
    assert isinstance(layer, nn.LayerNorm)
    rows = functional.layer_norm(x, layer.normalized_shape, eps=layer.eps).view(runs, -1, *layer.normalized_shape)
    return _scaled(rows, own).view(x.shape)


def group_norm(layer: nn.Module, x: Tensor, own: Tensors, runs: int) -> Tensor:
    """All runs of a group norm; x of shape (runs * batch, channels, ...)."""
    assert isinstance(layer, nn.GroupNorm)
    rows = functional.group_norm(x, layer.num_groups, eps=layer.eps).reshape(runs, -1, layer.num_channels, *_flat(x))
    return _scaled(rows, own).view(x.shape)


def instance_norm(layer: nn.Module, x: Tensor, own: Tensors, runs: int) -> Tensor:
    """All runs of an instance norm without running statistics; x of shape (runs * batch, channels, height, width)."""
    assert isinstance(layer, nn.InstanceNorm2d)
    if "running_mean" in own or x.ndim != 4:
        raise NotImplementedError("an instance norm with running statistics, or of one sample, is no layer of a stack")
    rows = functional.instance_norm(x, eps=layer.eps).reshape(runs, -1, layer.num_features, *_flat(x))
    return _scaled(rows, own).view(x.shape)


def _scaled(rows: Tensor, own: Tensors) -> Tensor:
    """rows * weight + bias: rows of shape (runs, batch, *shape, ...), weight and bias of shape (runs, *shape)."""
    told = {name: tensor.to(rows.dtype).unsqueeze(1) for name, tensor in own.items()}
    told = {name: tensor.view(*tensor.shape, *[1] * (rows.ndim - tensor.ndim)) for name, tensor in told.items()}
    if "bias" in told:
        return torch.addcmul(told["bias"], rows, told["weight"])
    return rows * told["weight"] if told else rows


def _flat(x: Tensor) -> tuple[int, ...]:
    """The places of a channel as one dimension, where it has any."""
    return (x[0, 0].numel(),) if x.ndim > 2 else ()


def by_channel(x: Tensor, runs: int) -> Tensor:
    """(runs * batch, channels, ...) as (batch, runs * channels, ...).

    Example:
        >>> by_channel(torch.zeros(2 * 5, 3, 8, 8), runs=2).shape
        torch.Size([5, 6, 8, 8])
    """
    return x.reshape(runs, -1, *x.shape[1:]).transpose(0, 1).flatten(1, 2)


def by_run(x: Tensor, runs: int) -> Tensor:
    """And back.

    Example:
        >>> by_run(torch.zeros(5, 6, 8, 8), runs=2).shape
        torch.Size([10, 3, 8, 8])
    """
    return x.reshape(x.shape[0], runs, -1, *x.shape[2:]).transpose(0, 1).flatten(0, 1)
