"""Outputs of any form, such as a detector's dictionary, with a divergence of the user's own."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from mooring.errors import MooringError
from mooring.reference.kinds.kind import OutputKind, Stored


@dataclass(frozen=True)
class Own(OutputKind):
    """Outputs of any form, compared by a function of the user.

    Args:
        function: divergence(old_outputs, new_outputs) -> one number for each sample, or their mean. It must be 0 for
            equal outputs and differentiable with respect to the new ones.

    Example:
        >>> kind = Own(lambda old, new: (new["boxes"] - old["boxes"]).square().sum(1))
        >>> kind.divergence(kind.store({"boxes": torch.zeros(2, 4)}), {"boxes": torch.ones(2, 4)})
        tensor([[4.],
                [4.]])
    """

    function: Callable[[Any, Any], Tensor]
    name = "own"
    splits = False
    find: ClassVar[Any] = staticmethod(lambda returned: returned)

    def store(self, outputs: Any) -> Stored:
        """Return a copy of the outputs, in plain dictionaries and lists."""
        return (_map(outputs, lambda t: t.detach().clone()),)

    def divergence(self, stored: Stored, outputs: Any) -> Tensor:
        """Return what the function gives, (samples, 1)."""
        value = self.function(_map(stored[0], lambda t: t), outputs)
        if not isinstance(value, Tensor) or value.ndim > 1:
            what = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"type {type(value).__name__}"
            raise MooringError(
                f"kind= returned {what} for (old outputs, new outputs): it must return a tensor with one number for "
                "each sample, or their mean"
            )
        return value.reshape(-1, 1)

    def drawn_loss(self, outputs: Any, generator: torch.Generator) -> Tensor:
        """Return the outputs in a random direction; the mean square of its gradient is that of all outputs."""
        tensors = [t for t in _tensors(outputs) if t.is_floating_point() and t.requires_grad]
        noise = [torch.randn(t.shape, generator=generator, device=t.device, dtype=t.dtype) for t in tensors]
        parts = [(z * t).sum() / max(1, len(t) if t.ndim else 1) for z, t in zip(noise, tensors, strict=True)]
        if not parts:
            raise MooringError("the model returned no tensor that depends on its parameters: give attach a loss=")
        return torch.stack([part.float().to(parts[0].device) for part in parts]).sum()

    def predictions(self, outputs: Any) -> None:
        """Return None: the divergence says what counts."""
        return

    def is_finite(self, stored: Stored) -> Tensor:
        """Return whether all numbers are finite."""
        tensors = [t for t in _tensors(stored[0]) if t.is_floating_point()]
        return torch.stack([t.isfinite().all() for t in tensors]).all() if tensors else torch.tensor(True)


class Fields(dict[str, Any]):
    """A dictionary whose entries are attributes too, as those of the dataclasses and outputs that models return."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(f"the stored outputs have no {name!r}: they have {', '.join(map(str, self))}")


def _map(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return outputs with each tensor changed, in dictionaries and lists."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple | list):
        return [_map(part, change) for part in value]
    parts = _named_parts(value)
    return value if parts is None else Fields({key: _map(part, change) for key, part in parts.items()})


def _named_parts(value: Any) -> Mapping[Any, Any] | None:
    """Return the entries of a mapping, or the fields of a dataclass; None for anything else."""
    if isinstance(value, Mapping):
        return value
    if not dataclasses.is_dataclass(value):
        return None
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of outputs."""
    tensors: list[Tensor] = []
    _map(value, lambda t: tensors.append(t) or t)  # type: ignore[func-returns-value]
    yield from tensors
