"""A mooring's state as a flat dictionary of tensors, which torch.save and safetensors both take."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mooring.errors import MooringError
from mooring.importance import State

__all__ = ["VERSION", "Moored", "pack", "unpack_header", "unpack_parameter"]

VERSION = 1
HEADER = "mooring"


@dataclass
class Moored:
    """One moored parameter and what is kept for it.

    Attributes:
        name: its name in the model.
        parameter: the live parameter.
        anchor: its value at the end of the last task, or where this one began.
        state: the importance's tensors on this task, `current` among them.
        previous: the importance over past tasks; None before the first consolidation, which counts as 0.
        count: the iterations of this task in which it had a gradient.
        wide: the dtype to compute in: the parameter's or that of what is kept, the wider one, at least float32.
    """

    name: str
    parameter: Tensor
    anchor: Tensor
    state: State
    previous: Tensor | None = None
    count: int = 0

    def __post_init__(self) -> None:
        """Settle the dtype to compute in."""
        self.wide = torch.promote_types(torch.promote_types(self.parameter.dtype, self.anchor.dtype), torch.float32)

    def slots(self) -> State:
        """Every tensor kept for the parameter, by what it is."""
        kept = {"anchor": self.anchor, **self.state}
        return kept if self.previous is None else {**kept, "previous": self.previous}

    def full(self, score: Tensor | None) -> Tensor:
        """A score in the parameter's shape: 0 where there is none, one number spread out."""
        return torch.zeros_like(self.anchor) if score is None else score.expand_as(self.anchor)


def pack(moored: Collection[Moored], buffers: Mapping[str, Tensor], header: dict[str, Any]) -> State:
    """The flat dictionary: `slot.parameter`, `buffer.name`, and a header of JSON bytes."""
    header = {"version": VERSION, **header, "counts": {m.name: m.count for m in moored}}
    flat = {HEADER: torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)}
    for m in moored:
        flat |= {f"{slot}.{m.name}": tensor for slot, tensor in m.slots().items()}
    return flat | {f"buffer.{name}": tensor for name, tensor in buffers.items()}


def unpack_header(flat: Mapping[str, Tensor]) -> dict[str, Any]:
    """The header, after checking that this is a mooring's state of a version that can be read."""
    try:
        header = json.loads(bytes(flat[HEADER].tolist()))
        version = header["version"]
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise MooringError(f"this is not the state of a Mooring: no readable {HEADER!r} entry") from error
    if version > VERSION:
        raise MooringError(
            f"the state has version {version}, this Mooring reads up to {VERSION}: install a newer mooring"
        )
    return dict(header)


def unpack_parameter(flat: Mapping[str, Tensor], fresh: Moored, count: int) -> Moored:
    """The kept tensors of one parameter, checked against a fresh one for what must be there and its shape."""
    name = fresh.name
    found: State = {}
    for slot, like in fresh.slots().items():
        key = f"{slot}.{name}"
        if key not in flat:
            raise MooringError(f"the state does not fit: {key!r} is missing")
        if flat[key].shape != like.shape:
            have, want = tuple(flat[key].shape), tuple(like.shape)
            raise MooringError(f"the state does not fit: {key!r} has shape {have}, the model needs {want}")
        found[slot] = flat[key].detach().to(like, copy=True)
    anchor = found.pop("anchor")
    previous = flat.get(f"previous.{name}")
    if previous is not None:
        if previous.shape not in (anchor.shape, torch.Size(())):
            raise MooringError(f"the state does not fit: 'previous.{name}' has shape {tuple(previous.shape)}")
        previous = previous.detach().to(anchor, copy=True)
    return Moored(name, fresh.parameter, anchor, found, previous, count)
