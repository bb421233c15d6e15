"""What every check has in common: equality to the bit, and training that is cut in two."""

from collections.abc import Callable, Mapping
from copy import deepcopy

import torch
from torch import Tensor

from mooring.testing.cases import Case

__all__ = ["check_equal", "check_resumes"]


def check_equal(what: str, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raise AssertionError unless both hold the same tensors, bit for bit (NaN equals NaN).

    Example:
        >>> check_equal("halves", {"a": torch.ones(1)}, {"a": torch.zeros(1)})
        Traceback (most recent call last):
        ...
        AssertionError: halves: 'a' differs, by up to 1
    """
    if found.keys() != expected.keys():
        raise AssertionError(f"{what}: {sorted(found.keys() ^ expected.keys())} only on one side")
    for name, tensor in found.items():
        other = expected[name]
        same_shape = tensor.shape == other.shape and tensor.dtype == other.dtype
        if not same_shape or not torch.equal(tensor.nan_to_num(), other.nan_to_num()):
            by = f", by up to {float((tensor.double() - other.double()).abs().max()):.3g}" if same_shape else " in kind"
            raise AssertionError(f"{what}: {name!r} differs{by}")


def check_resumes(make: Callable[[], Case]) -> None:
    """Training cut in the middle of a task and resumed in new objects equals training in one go, bit for bit."""
    whole, first, second = make(), make(), make()
    for case in (whole, first):
        torch.manual_seed(1)
        case.train(3)
        case.moor.consolidate()
        case.train(2, first=3)
    random_state = torch.get_rng_state()
    second.model.load_state_dict(deepcopy(first.model.state_dict()))
    second.optimizer.load_state_dict(deepcopy(first.optimizer.state_dict()))
    second.moor.load_state_dict(deepcopy(first.moor.state_dict()))
    for case in (whole, second):
        torch.set_rng_state(random_state)
        case.train(3, first=5)
        case.moor.consolidate()
        case.train(2, first=8)
    check_equal("resumed in the middle of a task", second.snapshot(), whole.snapshot())
    check_equal("the resumed mooring's state", second.moor.state_dict(), whole.moor.state_dict())
