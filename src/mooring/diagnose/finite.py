"""A check that stops a step before anything changes if a tensor is not finite."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mooring.distributed.dtensor import all_ranks_agree, local_tensor, reduce_over_shards
from mooring.errors import NonFiniteError


def check_finite(what: str, named: Sequence[tuple[str, Tensor]]) -> None:
    """Raise unless every value is finite; the error names the tensor with the largest share of bad values.

    Of the ranks that have shards of these tensors, either all raise or none.

    Args:
        what: what the tensors are, for the message.
        named: pairs of name and tensor.

    Example:
        >>> check_finite("gradient", [("weight", torch.tensor([1.0, float("nan")]))])
        Traceback (most recent call last):
        ...
        mooring.errors.NonFiniteError: the gradient of 'weight' is not finite (1 of 2 values); nothing was changed: ...
    """
    tensors = [t for _, t in named]
    parts = [local_tensor(t) for t in tensors]
    norms = _norms(parts)
    if all_ranks_agree(not norms or bool(torch.stack([n.to(norms[0]) for n in norms]).isfinite().all()), tensors):
        return
    counts = reduce_over_shards([(~t.isfinite()).sum() for t in parts], tensors)
    bad = {name: (int(count), t.numel()) for (name, t), count in zip(named, counts, strict=True)}
    if not any(count for count, _ in bad.values()):
        return  # only a norm has overflowed
    worst = max(bad, key=lambda name: bad[name][0] / max(1, bad[name][1]))
    others = sum(count > 0 for count, _ in bad.values()) - 1
    more = f", and of {others} more" if others else ""
    raise NonFiniteError(
        f"the {what} of {worst!r}{more} is not finite ({bad[worst][0]} of {bad[worst][1]} values); "
        "nothing was changed: lower the learning rate or the strength, clip gradients, or call diagnose()"
    )


def _norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the sum of absolute values of each tensor, in few operations for thousands of small ones."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for t in tensors:
        by_kind.setdefault((t.device, t.dtype), []).append(t)
    norms: list[Tensor] = []
    for (_, dtype), members in by_kind.items():
        wide = torch.promote_types(dtype, torch.float32)
        norms += torch._foreach_norm(members, 1, dtype=None if wide == dtype else wide)
    return norms
