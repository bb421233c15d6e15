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
    if all_ranks_agree(not parts or bool(largest_values(parts).isfinite().all()), tensors):
        return
    counts = reduce_over_shards([(~t.isfinite()).sum() for t in parts], tensors)
    bad = {name: (int(count), t.numel()) for (name, t), count in zip(named, counts, strict=True)}
    worst = max(bad, key=lambda name: bad[name][0] / max(1, bad[name][1]))
    others = sum(count > 0 for count, _ in bad.values()) - 1
    more = f", and of {others} more" if others else ""
    raise NonFiniteError(
        f"the {what} of {worst!r}{more} is not finite ({bad[worst][0]} of {bad[worst][1]} values); "
        "nothing was changed: lower the learning rate or the strength, clip gradients, or call diagnose()"
    )


def largest_values(tensors: Sequence[Tensor]) -> Tensor:
    """Return the largest absolute value of each tensor, NaN if it has one, in few operations for thousands of tensors.

    Example:
        >>> largest_values([torch.tensor([1.0, -3.0]), torch.zeros(0), torch.tensor([torch.nan, 1.0])])
        tensor([3., 0., nan], dtype=torch.float64)
    """
    by_kind: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, t in enumerate(tensors):
        if t.numel():  # an empty tensor has no largest value
            by_kind.setdefault((t.device, t.dtype), []).append(index)
    device = tensors[0].device
    if len(by_kind) == 1 and len(next(iter(by_kind.values()))) == len(tensors):
        return torch.stack(torch._foreach_norm(list(tensors), float("inf"))).to(torch.float64)
    largest = [torch.zeros((), dtype=torch.float64, device=device)] * len(tensors)
    for indices in by_kind.values():
        norms = torch._foreach_norm([tensors[index] for index in indices], float("inf"))
        for index, value in zip(indices, torch.stack(norms).to(device, torch.float64).unbind(), strict=True):
            largest[index] = value
    return torch.stack(largest)
