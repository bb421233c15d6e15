"""Collectives over ranks that each see a part of the batch: samples, gradients and Kronecker factors."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mooring.distributed.dtensor import mesh_of, sharded
from mooring.importance.kronecker_factors import LayerFactors

BUCKET_SIZE = 1 << 23
"""Numbers in one all-reduce."""


def world_size() -> int:
    """Return the number of processes that train together.

    Example:
        >>> world_size()
        1
    """
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return the rank of this process.

    Example:
        >>> rank()
        0
    """
    return dist.get_rank() if world_size() > 1 else 0


def all_reduce_observation(
    samples: int, gradients: dict[Tensor, Tensor], parameters: Sequence[Tensor]
) -> tuple[int, dict[Tensor, Tensor]]:
    """Sum samples and gradients over the ranks; of a sharded parameter's gradient, each rank gets its shard.

    Every rank must call this, even one without samples. A missing gradient counts as 0; if no rank has a gradient of
    a parameter, the result has none.

    Args:
        samples: the number of samples on this rank.
        gradients: gradients of the whole parameters, from this rank's samples alone.
        parameters: the parameters that may have a gradient, in the same order on all ranks.

    Example:
        >>> all_reduce_observation(3, {}, [])
        (3, {})
    """
    mesh = mesh_of(parameters)
    if world_size() == 1 and mesh is None:
        return samples, gradients
    groups = [None] if mesh is None else [mesh.get_group(dim) for dim in range(mesh.ndim)]
    counts = [samples, *(int(p in gradients) for p in parameters)]
    device = parameters[0].device if parameters else None
    samples, *ranks_with_gradient = _all_reduce(torch.tensor(counts, device=device), groups).tolist()
    wanted = [p for p, ranks in zip(parameters, ranks_with_gradient, strict=True) if ranks]
    total = {p: _reduce_scatter(_gradient_or_zero(p, gradients), p) for p in wanted if sharded(p)}
    plain = [p for p in wanted if not sharded(p)]
    total |= zip(plain, _all_reduce_many([_gradient_or_zero(p, gradients) for p in plain], groups), strict=True)
    return samples, total


def all_reduce_factors(
    layers: Sequence[nn.Module], observed: dict[nn.Module, tuple[int, LayerFactors]]
) -> list[tuple[nn.Module, LayerFactors]]:
    """Combine A, G and a bias's G of each rank's mean loss into those of the mean loss over all ranks.

    The gradient is averaged over W ranks, so a layer's share of it is 1 / W of what this rank observed. With n of all
    samples on this rank: A <- sum over ranks of n / samples * A; G <- sum over ranks of samples / n * G / W^2.

    Args:
        layers: all observed layers, in the same order on all ranks.
        observed: samples and factors of the layers that ran on this rank.
    """
    if world_size() == 1:
        return [(layer, factors) for layer, (_, factors) in observed.items()]
    device = next(layers[0].parameters()).device
    counts = torch.tensor([observed[layer][0] if layer in observed else 0 for layer in layers], device=device)
    totals = _all_reduce(counts, [None]).tolist()
    ran = [(layer, total) for layer, total in zip(layers, totals, strict=True) if total]
    contributions = [factor for layer, total in ran for factor in _contribution(layer, total, observed.get(layer))]
    summed = _all_reduce_many(contributions, [None])
    return [(layer, (next(summed), next(summed), next(summed))) for layer, _ in ran]


def _contribution(layer: Any, total: int, observed: tuple[int, LayerFactors] | None) -> LayerFactors:
    """Return this rank's term in the sum of a layer's factors; zeros if the layer did not run here."""
    out, dtype = layer.weight.shape[0], torch.promote_types(layer.weight.dtype, torch.float32)
    if observed is None:
        a, g, sums = (layer.weight.new_zeros(n, n, dtype=dtype) for n in (layer.weight[0].numel(), out, out))
        return a, g, sums
    n, (a, g, sums) = observed
    weight = total / n / world_size() ** 2
    return a.to(dtype) * (n / total), g.to(dtype) * weight, sums.to(dtype) * weight


def _gradient_or_zero(p: Tensor, gradients: dict[Tensor, Tensor]) -> Tensor:
    """Return this rank's gradient in at least float32; zeros if it has none."""
    dtype = torch.promote_types(p.dtype, torch.float32)
    return gradients[p].to(dtype) if p in gradients else torch.zeros(p.shape, dtype=dtype, device=p.device)


def _reduce_scatter(gradient: Tensor, p: Any) -> Tensor:
    """Sum a gradient over the ranks; each rank gets its shard of the sum."""
    from torch.distributed.tensor import DTensor, Partial

    partial = DTensor.from_local(gradient, p.device_mesh, [Partial()] * p.device_mesh.ndim, run_check=False)
    return partial.redistribute(p.device_mesh, p.placements)


def _all_reduce(tensor: Tensor, groups: Sequence[Any]) -> Tensor:
    for group in groups:
        dist.all_reduce(tensor, group=group)
    return tensor


def _all_reduce_many(tensors: Sequence[Tensor], groups: Sequence[Any]) -> Iterator[Tensor]:
    """Sum many tensors over the ranks in buckets, so that small ones do not wait for the network one by one."""
    bucket: list[Tensor] = []
    for index, tensor in enumerate(tensors):
        bucket.append(tensor)
        last = index + 1 == len(tensors) or tensors[index + 1].dtype != tensor.dtype
        if last or sum(t.numel() for t in bucket) >= BUCKET_SIZE:
            flat = _all_reduce(torch.cat([t.reshape(-1) for t in bucket]), groups)
            parts = torch.split(flat, [t.numel() for t in bucket])
            yield from (part.view(t.shape) for part, t in zip(parts, bucket, strict=True))
            bucket = []
