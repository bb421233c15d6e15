"""Ranks, and helpers for sharded parameters: the part on this rank, the whole DTensor, and reductions over shards."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mooring.errors import MooringError
from mooring.rules import Importance

PLAIN = frozenset({Tensor, nn.Parameter})
"""Types that are certainly not sharded: a fast check, since each step asks about every parameter several times."""


_is_alone = False
"""Whether this rank computes by itself, in `one_process`."""


@contextmanager
def one_process() -> Iterator[None]:
    """Let this rank compute by itself, as one process would; it must not wait for other ranks meanwhile.

    Example:
        >>> with one_process():
        ...     world_size()
        1
    """
    global _is_alone
    before, _is_alone = _is_alone, True
    try:
        yield
    finally:
        _is_alone = before


def world_size() -> int:
    """Return the number of processes that train together.

    Example:
        >>> world_size()
        1
    """
    alone = _is_alone or not (dist.is_available() and dist.is_initialized())
    return 1 if alone else dist.get_world_size()


def rank() -> int:
    """Return the rank of this process.

    Example:
        >>> rank()
        0
    """
    return dist.get_rank() if world_size() > 1 else 0


def sharded(tensor: Tensor) -> bool:
    """Return whether this is a DTensor, such as the parameters after `fully_shard`.

    Example:
        >>> sharded(torch.zeros(2))
        False
    """
    if type(tensor) in PLAIN:
        return False
    module = sys.modules.get("torch.distributed.tensor")  # if it was not imported, no DTensor exists
    return module is not None and isinstance(tensor, module.DTensor)


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the part on this rank, which shares its memory; a plain tensor is returned as it is.

    Example:
        >>> local_tensor(torch.zeros(2))
        tensor([0., 0.])
    """
    if type(tensor) in PLAIN or not sharded(tensor):
        return tensor
    with torch.no_grad():
        part: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return part


def version_of(tensor: Tensor) -> int:
    """Return a number that grows when the part of a tensor on this rank is written to.

    Example:
        >>> tensor = torch.zeros(2)
        >>> before = version_of(tensor)
        >>> version_of(tensor.add_(1)) - before
        1
    """
    return 0 if tensor.is_inference() else local_tensor(tensor)._version


def local_tensors(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return `local_tensor` of each tensor; quickly where all are plain, as thousands are in each step.

    Example:
        >>> local_tensors([torch.zeros(2), torch.zeros(1)])
        [tensor([0., 0.]), tensor([0.])]
    """
    return tensors if PLAIN.issuperset(map(type, tensors)) else [local_tensor(t) for t in tensors]


def local_gradient(p: Any) -> Tensor:
    """Return the part of a parameter's gradient on this rank, after a sum over ranks if it is partial."""
    g = p.grad
    same = not sharded(p) or g.placements == p.placements
    return local_tensor(g if same else g.redistribute(p.device_mesh, p.placements))


def local_gradients(parameters: Sequence[Tensor], gradients: list[Tensor] | None = None) -> list[Tensor]:
    """Return `local_gradient` of each parameter, whose gradients may be known; quickly where all are plain."""
    if gradients is None:
        gradients = [g for p in parameters if (g := p.grad) is not None]
    if PLAIN.issuperset(map(type, parameters)) and PLAIN.issuperset(map(type, gradients)):
        return gradients
    return [local_gradient(p) for p in parameters]


def to_dtensor(part: Tensor, like: Any, *, rows: bool = False) -> Tensor:
    """Return the DTensor that has this part on this rank, with the placements of `like`.

    The part itself is returned if `like` is not sharded, or if the part is a scalar. With rows=True the part has as
    many rows as the parameter's part, of another length.
    """
    if not sharded(like) or not (rows or part.shape == local_tensor(like).shape):
        return part
    from torch.distributed.tensor import DTensor

    shape, stride = (torch.Size([len(like), *part.shape[1:]]), part.stride()) if rows else (like.shape, like.stride())
    layout: dict[str, Any] = {"run_check": False, "shape": shape, "stride": stride}
    return DTensor.from_local(part, like.device_mesh, like.placements, **layout)


def local_part(whole: Any, like: Any, *, rows: bool = False) -> Tensor:
    """Return the part of a whole tensor that the parameter `like` has on this rank; a scalar is not split."""
    if not (rows or whole.shape == like.shape) or not sharded(like):
        return gathered(whole)
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh
    if sharded(whole) and whole.device_mesh != mesh:
        whole = whole.full_tensor()
    if sharded(whole):
        return local_tensor(whole.redistribute(mesh, like.placements))
    whole = DTensor.from_local(whole.to(mesh.device_type), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return local_tensor(whole.redistribute(mesh, like.placements)).clone()  # so that the whole can be freed


def gathered(tensor: Tensor) -> Tensor:
    """Return the whole of a sharded tensor, which every rank must ask for; a plain tensor is returned as it is.

    Example:
        >>> gathered(torch.zeros(2))
        tensor([0., 0.])
    """
    whole: Tensor = tensor.full_tensor() if sharded(tensor) else tensor  # type: ignore[attr-defined]
    return whole


def reduce_over_shards(
    values: Sequence[Tensor], of: Sequence[Tensor], op: Literal["sum", "max"] = "sum"
) -> list[Tensor]:
    """Reduce one value per parameter over its shards: one all-reduce, and none if nothing is sharded.

    Args:
        values: the value of the part on this rank, for each parameter; all of one shape.
        of: the parameters, or tensors with the same placements.
        op: the reduction.

    Example:
        >>> reduce_over_shards([torch.tensor(1.0)], [torch.zeros(2)])
        [tensor(1.)]
    """
    reduced = list(values)
    indices_by_layout: dict[Any, list[int]] = {}
    for index, tensor in enumerate(of):
        if (layout := _sharded_dims(tensor)) is not None:
            indices_by_layout.setdefault(layout, []).append(index)
    for (mesh, dims), indices in indices_by_layout.items():
        stacked = torch.stack([reduced[index] for index in indices])
        for dim in dims:
            reduce_op = dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX
            dist.all_reduce(stacked, op=reduce_op, group=mesh.get_group(dim))
        for index, value in zip(indices, stacked, strict=True):
            reduced[index] = value
    return reduced


def all_ranks_agree(ok: bool, of: Sequence[Tensor]) -> bool:
    """Return whether `ok` is true on every rank that has a shard of these tensors, so that all of them go on or none.

    Example:
        >>> all_ranks_agree(True, [torch.zeros(2)])
        True
    """
    one_per_layout = list({layout: t for t in of if (layout := _sharded_dims(t)) is not None}.values())
    failed = [torch.tensor(float(not ok), device=local_tensor(t).device) for t in one_per_layout]
    return ok if not failed else not any(map(bool, reduce_over_shards(failed, one_per_layout, "max")))


def _sharded_dims(tensor: Any) -> tuple[Any, tuple[int, ...]] | None:
    """Return the mesh and those of its dimensions that a tensor is sharded over; None if it is whole."""
    if not sharded(tensor):
        return None
    dims = tuple(dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate())
    return (tensor.device_mesh, dims) if dims else None


def mesh_of(parameters: Iterable[Tensor]) -> Any:
    """Return the mesh of the first sharded parameter; None if none is sharded."""
    return next((p.device_mesh for p in parameters if sharded(p)), None)  # type: ignore[attr-defined]


def _fsdp_modules(modules: Iterable[nn.Module]) -> list[Any]:
    """Return the modules that `fully_shard` was called on."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return [] if kind is None else [module for module in modules if isinstance(module, kind)]


def is_fully_sharded(model: nn.Module) -> bool:
    """Return whether `fully_shard` was called on the model or on a part of it.

    Example:
        >>> is_fully_sharded(nn.Linear(2, 2))
        False
    """
    return bool(_fsdp_modules(model.modules()))


def reshard(modules: Iterable[nn.Module]) -> None:
    """Reshard the parameters of modules that a forward pass without a backward pass left gathered."""
    for module in _fsdp_modules(modules):
        module.reshard()


def gathered_parameters(model: nn.Module) -> dict[Tensor, Tensor]:
    """Map each sharded parameter to the gathered one that the forward pass used."""
    gathered: dict[Tensor, Tensor] = {}
    try:
        for module in _fsdp_modules(model.modules()):
            state = module._get_fsdp_state()  # torch has no public mapping between the two
            groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
            for group in groups:
                for fsdp_param in group.fsdp_params if group else []:
                    if hasattr(fsdp_param, "_unsharded_param"):
                        gathered[fsdp_param.sharded_param] = fsdp_param._unsharded_param
    except AttributeError as error:
        raise MooringError(
            f"cannot find the parameters that fully_shard gathered in torch {torch.__version__}: use an "
            "importance that reads gradients only, such as EWC(), SI() or RWalk()"
        ) from error
    return gathered


def check_sharding(model: nn.Module, importance: Importance, parameters: Sequence[Tensor], *, rows: bool) -> None:
    """Refuse flattened parameters, Kronecker factors of shards, and samples that several ranks share.

    With rows=True, for 8-bit blocks of rows, also refuse parameters that are sharded along any dimension but 0.
    """
    flat = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    if flat is not None and any(isinstance(module, flat) for module in model.modules()):
        raise MooringError("FullyShardedDataParallel flattens parameters, which cannot be moored: use fully_shard")
    parts = [p for p in parameters if sharded(p)]
    if parts and importance.by_layer:
        raise MooringError(
            f"{importance.name}() needs whole layers, which no rank has under fully_shard: use EWC(per_sample=True)"
        )
    layouts = [layout for p in parts if (layout := _sharded_dims(p)) is not None]
    shares_samples = not is_fully_sharded(model) or any(len(dims) > 1 for _, dims in layouts)
    if parts and importance.watches != "nothing" and shares_samples:
        raise MooringError(
            f"{importance.name} counts the samples of each rank, but tensor parallel ranks share samples: use an "
            "importance that reads gradients only, such as EWC(), SI() or RWalk(), and give per_sample a batch_size"
        )
    placements = [placement for p in parts for placement in p.placements]  # type: ignore[attr-defined]
    if rows and not all(placement.is_replicate() or placement.is_shard(0) for placement in placements):
        raise MooringError(
            'previous="8bit" stores blocks of rows, but a parameter is sharded along another dimension: shard '
            "dimension 0, or give Memory(previous=) a dtype"
        )
