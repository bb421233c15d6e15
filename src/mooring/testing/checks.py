"""Checks that both suites use: bitwise equality, and training that is interrupted and resumed."""

from collections.abc import Callable, Mapping
from copy import deepcopy

import torch
from torch import Tensor

from mooring.testing.cases import Case

__all__ = ["check_equal", "check_resumes"]


def check_equal(what: str, actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raise AssertionError unless both have the same tensors, bit for bit (NaN equals NaN).

    Example:
        >>> check_equal("halves", {"a": torch.ones(1)}, {"a": torch.zeros(1)})
        Traceback (most recent call last):
        ...
        AssertionError: halves: 'a' differs, by up to 1
    """
    if actual.keys() != expected.keys():
        raise AssertionError(f"{what}: {sorted(actual.keys() ^ expected.keys())} are only on one side")
    for name, tensor in actual.items():
        other = expected[name]
        same_shape = tensor.shape == other.shape and tensor.dtype == other.dtype
        if not same_shape or not torch.equal(tensor.nan_to_num(), other.nan_to_num()):
            by = f", by up to {(tensor.double() - other.double()).abs().max():.3g}" if same_shape else " in type"
            raise AssertionError(f"{what}: {name!r} differs{by}")


def check_resumes(make: Callable[[], Case]) -> None:
    """Check that training interrupted in a task and resumed in new objects equals uninterrupted training."""
    uninterrupted, first, second = make(), make(), make()
    for case in (uninterrupted, first):
        torch.manual_seed(1)
        case.train(3)
        case.moor.consolidate()
        case.train(2, first=3)
    random_state = torch.get_rng_state()
    second.model.load_state_dict(deepcopy(first.model.state_dict()))
    second.optimizer.load_state_dict(deepcopy(first.optimizer.state_dict()))
    second.moor.load_state_dict(deepcopy(first.moor.state_dict()))
    for case in (uninterrupted, second):
        torch.set_rng_state(random_state)
        case.train(3, first=5)
        case.moor.consolidate()
        case.train(2, first=8)
    check_equal("resumed in the middle of a task", second.snapshot(), uninterrupted.snapshot())
    check_equal("the resumed mooring's state", second.moor.state_dict(), uninterrupted.moor.state_dict())
