"""A parameter that lies in parts on several ranks: the part here, the whole it belongs to, and sums over all parts."""

import sys
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mooring.errors import MooringError
from mooring.importance import Importance

__all__ = [
    "all_ranks_agree",
    "check_rows",
    "check_sharding",
    "gradient_of",
    "leaves",
    "local_part",
    "local_tensor",
    "mesh_of",
    "reshard",
    "sharded",
    "sum_over_shards",
    "to_dtensor",
]


PLAIN = frozenset({Tensor, nn.Parameter})
"""Types that need no further look: a model may have thousands of parameters, asked several times in a step."""


def sharded(tensor: Tensor) -> bool:
    """Whether this is a DTensor, such as `fully_shard` makes of parameters.

    Example:
        >>> sharded(torch.zeros(2))
        False
    """
    if type(tensor) in PLAIN:
        return False
    module = sys.modules.get("torch.distributed.tensor")  # where it was not imported, there are none
    return module is not None and isinstance(tensor, module.DTensor)


def local_tensor(tensor: Tensor) -> Tensor:
    """The part on this rank, which shares its memory; a plain tensor is its own.

    Example:
        >>> local_tensor(torch.zeros(2))
        tensor([0., 0.])
    """
    if type(tensor) in PLAIN or not sharded(tensor):
        return tensor
    with torch.no_grad():
        part: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return part


def gradient_of(p: Any) -> Tensor:
    """The part of a parameter's gradient on this rank; one that tensor parallel ranks have not added up yet is."""
    g = p.grad
    if type(p) in PLAIN and type(g) in PLAIN:
        return g  # type: ignore[no-any-return]
    return local_tensor(
        g.redistribute(p.device_mesh, p.placements) if sharded(p) and g.placements != p.placements else g
    )


def to_dtensor(part: Tensor, like: Any, *, rows: bool = False) -> Tensor:
    """The whole whose part on this rank this is, laid out like a parameter; plain where that is, and one number is.

    With rows, the part has as many rows as the parameter's, of another length.
    """
    if not sharded(like) or not (rows or part.shape == local_tensor(like).shape):
        return part
    from torch.distributed.tensor import DTensor

    shape, stride = (torch.Size([len(like), *part.shape[1:]]), part.stride()) if rows else (like.shape, like.stride())
    told: dict[str, Any] = {"run_check": False, "shape": shape, "stride": stride}
    whole: Tensor = DTensor.from_local(part, like.device_mesh, like.placements, **told)
    return whole


def local_part(whole: Any, like: Any, *, rows: bool = False) -> Tensor:
    """The part of a whole, plain or a DTensor, that a parameter has on this rank; one number is whole everywhere."""
    if not (rows or whole.shape == like.shape) or not sharded(like):
        known: Tensor = whole.full_tensor() if sharded(whole) else whole
        return known
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh
    if sharded(whole) and whole.device_mesh != mesh:
        whole = whole.full_tensor()
    if not sharded(whole):
        whole = DTensor.from_local(whole.to(mesh.device_type), mesh, [Replicate()] * mesh.ndim, run_check=False)
        return local_tensor(
            whole.redistribute(mesh, like.placements)
        ).clone()  # nothing is sent, and the rest is let go
    return local_tensor(whole.redistribute(mesh, like.placements))


def sum_over_shards(values: Sequence[Tensor], of: Sequence[Tensor], how: Literal["sum", "max"] = "sum") -> list[Tensor]:
    """What is known of each part, over all parts: one all-reduce, and none where nothing is sharded.

    Args:
        values: of the part here, for each parameter; all of one shape.
        of: the parameters, or tensors that are laid out like them.
        how: to put parts together.

    Example:
        >>> sum_over_shards([torch.tensor(1.0)], [torch.zeros(2)])
        [tensor(1.)]
    """
    found = list(values)
    alike: dict[Any, list[int]] = {}
    for place, tensor in enumerate(of):
        if (groups := _groups(tensor)) is not None:
            alike.setdefault(groups, []).append(place)
    for (mesh, dims), places in alike.items():
        together = torch.stack([found[place] for place in places])
        for dim in dims:
            op = dist.ReduceOp.SUM if how == "sum" else dist.ReduceOp.MAX
            dist.all_reduce(together, op=op, group=mesh.get_group(dim))
        for place, value in zip(places, together, strict=True):
            found[place] = value
    return found


def all_ranks_agree(fine: bool, of: Sequence[Tensor]) -> bool:
    """Whether it is fine on every rank that has a part of one of these; so that all of them go on, or none.

    Example:
        >>> all_ranks_agree(True, [torch.zeros(2)])
        True
    """
    known: dict[Any, Tensor] = {}
    for tensor in of:
        if (groups := _groups(tensor)) is not None:
            known.setdefault(groups, tensor)
    bad = [torch.tensor(float(not fine), device=local_tensor(t).device) for t in known.values()]
    return fine if not bad else not any(bool(each) for each in sum_over_shards(bad, list(known.values()), "max"))


def _groups(tensor: Any) -> tuple[Any, tuple[int, ...]] | None:
    """Over which dimensions of which mesh a tensor is cut up; None where it is whole."""
    if not sharded(tensor):
        return None
    dims = tuple(dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate())
    return (tensor.device_mesh, dims) if dims else None


def mesh_of(parameters: Iterable[Tensor]) -> Any:
    """The mesh that the first of them that is sharded lies on; None where none is."""
    return next((p.device_mesh for p in parameters if sharded(p)), None)  # type: ignore[attr-defined]


def _units(model: nn.Module) -> list[Any]:
    """The modules that `fully_shard` was called on."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return [] if kind is None else [module for module in model.modules() if isinstance(module, kind)]


def reshard(model: nn.Module) -> None:
    """Have a model show its parameters in parts: after a forward pass without a backward, some are gathered."""
    for unit in _units(model):
        unit.reshard()


def leaves(model: nn.Module) -> dict[Tensor, Tensor]:
    """The gathered parameter that a forward pass computed with, for each sharded one."""
    found: dict[Tensor, Tensor] = {}
    try:
        for unit in _units(model):
            state = unit._get_fsdp_state()  # there is no public way from one to the other
            groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
            for group in groups:
                for each in group.fsdp_params if group else []:
                    if hasattr(each, "_unsharded_param"):
                        found[each.sharded_param] = each._unsharded_param
    except AttributeError as error:
        raise MooringError(
            f"cannot find the parameters that fully_shard gathered in torch {torch.__version__}: use an importance of "
            "the gradient, such as EWC(), SI() or RWalk()"
        ) from error
    return found


def check_rows(parameters: Sequence[Any]) -> None:
    """Refuse parameters that are cut into anything but rows, as `fully_shard` does, where blocks of rows are kept."""
    for p in parameters:
        if sharded(p) and not all(placement.is_replicate() or placement.is_shard(0) for placement in p.placements):
            raise MooringError(
                'previous="8bit" keeps blocks of rows, and a parameter is cut otherwise: shard dimension 0, or give '
                "Memory(previous=) a dtype"
            )


def check_sharding(model: nn.Module, importance: Importance, parameters: Sequence[Tensor]) -> None:
    """Refuse what cannot be right: flattened parameters, factors of shards, samples that several ranks share."""
    flat = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    if flat is not None and any(isinstance(module, flat) for module in model.modules()):
        raise MooringError("FullyShardedDataParallel flattens parameters, which cannot be moored: use fully_shard")
    parts = [p for p in parameters if sharded(p)]
    if parts and importance.by_layer:
        raise MooringError(
            f"{importance.name}() turns whole layers, which no rank has under fully_shard: use EWC(per_sample=True)"
        )
    if importance.watches == "nothing" or not parts:
        return
    if not _units(model) or any(len(groups[1]) > 1 for p in parts if (groups := _groups(p)) is not None):
        raise MooringError(
            f"{importance.name} counts the samples of each rank, which tensor parallel ranks share: use an importance "
            "of the gradient, such as EWC(), SI() or RWalk(), and give per_sample a batch_size"
        )
