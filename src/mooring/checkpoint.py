"""A mooring's state as a flat dictionary of tensors, which torch.save and safetensors both take."""

import json
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from mooring.errors import MooringError
from mooring.factors import Factor
from mooring.importance import State
from mooring.ledger import Moored
from mooring.shards import part_of, spread

__all__ = ["VERSION", "check_keys", "pack", "unpack_header", "unpack_parameter"]

VERSION = 1
HEADER = "mooring"


def pack(moored: Collection[Moored], buffers: Mapping[str, Tensor], header: dict[str, Any]) -> State:
    """The flat dictionary: `slot.parameter`, `buffer.name`, and a header of JSON bytes."""
    header = {"version": VERSION, **header, "counts": {m.name: m.count for m in moored}}
    flat = {HEADER: torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)}
    for m in moored:
        flat |= {f"{slot}.{m.name}": spread(t.contiguous(), m.parameter) for slot, t in m.slots().items()}
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
        if flat[key].shape != spread(like, fresh.parameter).shape:
            have, want = tuple(flat[key].shape), tuple(spread(like, fresh.parameter).shape)
            raise MooringError(f"the state does not fit: {key!r} has shape {have}, the model needs {want}")
        found[slot] = part_of(flat[key].detach(), fresh.parameter).to(like, copy=True)
    anchor = found.pop("anchor")
    factor = None
    if fresh.factor:
        inputs, outputs, past_inputs, past_outputs = (found.pop(slot) for slot in fresh.factor.slots())
        factor = Factor(inputs, outputs, past_inputs, past_outputs)
    previous = flat.get(f"previous.{name}")
    if previous is not None:
        if previous.shape not in (fresh.parameter.shape, torch.Size(())):
            raise MooringError(f"the state does not fit: 'previous.{name}' has shape {tuple(previous.shape)}")
        previous = part_of(previous.detach(), fresh.parameter).to(anchor, copy=True)
    return Moored(name, fresh.parameter, anchor, found, previous, count, factor)


def check_keys(flat: Mapping[str, Tensor], moored: Collection[Moored]) -> None:
    """Refuse entries that nothing asked for: they belong to other options or another model."""
    known = {HEADER, *(f"{slot}.{m.name}" for m in moored for slot in m.slots())}
    left = sorted(key for key in flat if key not in known and not key.startswith("buffer."))
    if left:
        raise MooringError(f"the state does not fit: nothing here takes {', '.join(map(repr, left))}")
