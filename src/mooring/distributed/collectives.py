"""What each rank saw of its own share of a batch, added up over all ranks: samples, gradients, Kronecker factors."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mooring.distributed.dtensor import mesh_of, sharded
from mooring.importance.kronecker_factors import Factors

__all__ = ["factors_over_ranks", "rank", "seen_over_ranks", "world_size"]

BUCKET = 1 << 23
"""How many numbers are sent at once."""


def world_size() -> int:
    """Return the number of processes that train together.

    Example:
        >>> world_size()
        1
    """
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Which of the processes that train together this is.

    Example:
        >>> rank()
        0
    """
    return dist.get_rank() if world_size() > 1 else 0


def seen_over_ranks(
    samples: int, gradients: dict[Tensor, Tensor], parameters: Sequence[Tensor]
) -> tuple[int, dict[Tensor, Tensor]]:
    """Samples and gradients, summed over the ranks; a gradient of a sharded parameter goes to its shards.

    Every rank takes part, also one that saw nothing: no gradient is a gradient of 0, unless none has any.

    Args:
        samples: that this rank saw.
        gradients: of the whole parameters, from its samples alone.
        parameters: that could have one, in an order that all ranks share.

    Example:
        >>> seen_over_ranks(3, {}, [])
        (3, {})
    """
    mesh = mesh_of(parameters)
    if world_size() == 1 and mesh is None:
        return samples, gradients
    groups = _everyone(mesh)
    there = [samples, *(int(p in gradients) for p in parameters)]
    known = torch.tensor(there, device=parameters[0].device if parameters else None)
    samples, *seen = _summed(known, groups).tolist()
    wanted = [p for p, count in zip(parameters, seen, strict=True) if count]
    found: dict[Tensor, Tensor] = {}
    for p in wanted:
        if sharded(p):
            found[p] = _scattered(_own(p, gradients), p)
    plain = [p for p in wanted if not sharded(p)]
    found |= zip(plain, _all_summed([_own(p, gradients) for p in plain], groups), strict=True)
    return samples, found


def factors_over_ranks(
    layers: Sequence[nn.Module], seen: dict[nn.Module, tuple[int, Factors]]
) -> list[tuple[nn.Module, Factors]]:
    """A, G and a bias's G of the mean loss over all ranks, from those of the mean loss on each.

    The gradient is averaged over W ranks, so what comes back to a layer is 1 / W of what this rank saw. With n of
    all samples here: A <- sum over ranks of n / samples * A; G <- sum over ranks of samples / n * G / W^2.

    Args:
        layers: all that are watched, in an order that all ranks share.
        seen: samples and factors of those that ran.
    """
    if world_size() == 1:
        return [(layer, factors) for layer, (_, factors) in seen.items()]
    place = next(layers[0].parameters()).device
    counts = torch.tensor([seen[layer][0] if layer in seen else 0 for layer in layers], device=place)
    totals = _summed(counts, [None]).tolist()
    ran = [(layer, total) for layer, total in zip(layers, totals, strict=True) if total]
    shares = [part for layer, total in ran for part in _share(layer, total, seen.get(layer))]
    every: Iterator[Any] = iter(list(_all_summed(shares, [None])))
    return [(layer, (next(every), next(every), next(every))) for layer, _ in ran]


def _share(layer: Any, total: int, seen: tuple[int, Factors] | None) -> Factors:
    """What this rank adds to a layer's factors."""
    out, dtype = layer.weight.shape[0], torch.promote_types(layer.weight.dtype, torch.float32)
    if seen is None:
        a, g, sums = (layer.weight.new_zeros(n, n, dtype=dtype) for n in (layer.weight[0].numel(), out, out))
        return a, g, sums
    n, (a, g, sums) = seen
    weight = total / n / world_size() ** 2
    return a.to(dtype) * (n / total), g.to(dtype) * weight, sums.to(dtype) * weight


def _everyone(mesh: Any) -> list[Any]:
    """The groups over which each rank has samples of its own: those of the mesh, or all there are."""
    return [None] if mesh is None else [mesh.get_group(dim) for dim in range(mesh.ndim)]


def _own(p: Tensor, gradients: dict[Tensor, Tensor]) -> Tensor:
    """This rank's gradient, in a dtype to add up in; 0 where it has none."""
    dtype = torch.promote_types(p.dtype, torch.float32)
    return gradients[p].to(dtype) if p in gradients else torch.zeros(p.shape, dtype=dtype, device=p.device)


def _scattered(gradient: Tensor, p: Any) -> Tensor:
    """Summed over ranks, and on each its own shard."""
    from torch.distributed.tensor import DTensor, Partial

    mesh = p.device_mesh
    each = DTensor.from_local(gradient, mesh, [Partial()] * mesh.ndim, run_check=False)
    summed: Tensor = each.redistribute(mesh, p.placements)
    return summed


def _summed(tensor: Tensor, groups: Sequence[Any]) -> Tensor:
    for group in groups:
        dist.all_reduce(tensor, group=group)
    return tensor


def _all_summed(tensors: Sequence[Tensor], groups: Sequence[Any]) -> Iterator[Tensor]:
    """Many at once, so that small ones do not each wait for the network."""
    bucket: list[Tensor] = []
    for place, tensor in enumerate(tensors):
        bucket.append(tensor)
        last = place + 1 == len(tensors) or tensors[place + 1].dtype != tensor.dtype
        if last or sum(t.numel() for t in bucket) >= BUCKET:
            flat = _summed(torch.cat([t.reshape(-1) for t in bucket]), groups)
            parts = torch.split(flat, [t.numel() for t in bucket])
            yield from (part.view(t.shape) for part, t in zip(parts, bucket, strict=True))
            bucket = []
