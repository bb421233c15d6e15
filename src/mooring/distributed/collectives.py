"""Collectives over ranks that each see a part of the batch: samples, gradients and sums of many tensors."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mooring.distributed.dtensor import mesh_of, sharded, world_size

BUCKET_SIZE = 1 << 23
"""Numbers in one all-reduce."""


def all_reduce_observation(
    samples: int | Tensor, gradients: dict[Tensor, Tensor], parameters: Sequence[Tensor]
) -> tuple[int | Tensor, dict[Tensor, Tensor]]:
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
    groups: Sequence[Any] = [None] if mesh is None else [mesh.get_group(dim) for dim in range(mesh.ndim)]
    counts = [int(samples), *(int(p in gradients) for p in parameters)]
    device = parameters[0].device if parameters else None
    samples, *ranks_with_gradient = all_reduce(torch.tensor(counts, device=device), groups).tolist()
    wanted = [p for p, ranks in zip(parameters, ranks_with_gradient, strict=True) if ranks]
    total = {p: _reduce_scatter(_gradient_or_zero(p, gradients), p) for p in wanted if sharded(p)}
    plain = [p for p in wanted if not sharded(p)]
    total |= zip(plain, all_reduce_many([_gradient_or_zero(p, gradients) for p in plain], groups), strict=True)
    return samples, total


def _gradient_or_zero(p: Tensor, gradients: dict[Tensor, Tensor]) -> Tensor:
    """Return this rank's gradient in at least float32; zeros if it has none."""
    dtype = torch.promote_types(p.dtype, torch.float32)
    return gradients[p].to(dtype) if p in gradients else torch.zeros(p.shape, dtype=dtype, device=p.device)


def _reduce_scatter(gradient: Tensor, p: Any) -> Tensor:
    """Sum a gradient over the ranks; each rank gets its shard of the sum."""
    from torch.distributed.tensor import DTensor, Partial

    partial = DTensor.from_local(gradient, p.device_mesh, [Partial()] * p.device_mesh.ndim, run_check=False)
    return partial.redistribute(p.device_mesh, p.placements)


def all_reduce(tensor: Tensor, groups: Sequence[Any] = (None,)) -> Tensor:
    """Sum a tensor over the ranks of each group in turn, in place, and return it; None stands for all ranks."""
    for group in groups:
        dist.all_reduce(tensor, group=group)
    return tensor


def all_reduce_many(tensors: Sequence[Tensor], groups: Sequence[Any] = (None,)) -> Iterator[Tensor]:
    """Sum many tensors over the ranks in buckets, so that small ones do not wait for the network one by one."""
    bucket: list[Tensor] = []
    for index, tensor in enumerate(tensors):
        bucket.append(tensor)
        last = index + 1 == len(tensors) or tensors[index + 1].dtype != tensor.dtype
        if last or sum(t.numel() for t in bucket) >= BUCKET_SIZE:
            flat = all_reduce(torch.cat([t.reshape(-1) for t in bucket]), groups)
            parts = torch.split(flat, [t.numel() for t in bucket])
            yield from (part.view(t.shape) for part, t in zip(parts, bucket, strict=True))
            bucket = []
