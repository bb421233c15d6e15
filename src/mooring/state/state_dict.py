"""A mooring's state as a flat dictionary of tensors, which torch.save and safetensors both take."""

import json
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from mooring.distributed.dtensor import local_part, to_dtensor
from mooring.errors import MooringError
from mooring.importance import State
from mooring.importance.kronecker_factors import Factor
from mooring.state.memory import Memory, compute_dtype_of
from mooring.state.mooring_state import PAST, ParameterState
from mooring.state.quantization import BLOCKS, QuantizedImportance, block_of

__all__ = ["VERSION", "check_keys", "pack", "unpack_header", "unpack_parameter"]

VERSION, QUANTIZED_VERSION = 1, 2
"""The versions of the layout: with importances as plain tensors, and with quantized ones. Others are refused."""

REQUIRED_KEYS = ("importance", "options", "merge", "tasks", "steps", "moored", "factors", "pull", "buffers", "counts")
"""The keys that every header has."""

HEADER = "mooring"


def pack(moored: Collection[ParameterState], buffers: Mapping[str, Tensor], header: dict[str, Any]) -> State:
    """The flat dictionary: `slot.parameter`, `buffer.name`, and a header of JSON bytes."""
    coded = any(isinstance(m.previous, QuantizedImportance) for m in moored)
    header = {"version": QUANTIZED_VERSION if coded else VERSION, **header, "counts": {m.name: m.count for m in moored}}
    flat = {HEADER: torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)}
    for m in moored:
        for slot, t in m.slots().items():
            flat[f"{slot}.{m.name}"] = to_dtensor(t.contiguous(), m.parameter, rows=slot in BLOCKS)
    return flat | {f"buffer.{name}": tensor for name, tensor in buffers.items()}


def unpack_header(flat: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the header; refuse what is not the state of a Mooring, and other versions."""
    try:
        header = json.loads(bytes(flat[HEADER].tolist()))
        version = header["version"]
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise MooringError(f"this is not the state of a Mooring: no readable {HEADER!r} entry") from error
    if version not in (VERSION, QUANTIZED_VERSION):
        raise MooringError(
            f"the state has version {version}, this Mooring reads {VERSION} and {QUANTIZED_VERSION}: "
            "load it with the Mooring that wrote it"
        )
    if missing := [key for key in REQUIRED_KEYS if key not in header]:
        raise MooringError(f"the state is damaged: its header has no {', '.join(map(repr, missing))}")
    return dict(header)


def unpack_parameter(
    flat: Mapping[str, Tensor], fresh: ParameterState, count: int, memory: Memory, *, accumulates: bool
) -> ParameterState:
    """The kept tensors of one parameter, checked against a fresh one for what must be there and its shape.

    They are kept as `memory` says, whatever they were saved as. Where who saved them did not accumulate, there is
    nothing of a task that has not begun: it starts as a fresh one.
    """
    name = fresh.name
    found: State = {}
    for slot, like in fresh.slots().items():
        if slot in fresh.state and not accumulates and not count:
            found[slot] = like
            continue
        key = f"{slot}.{name}"
        if key not in flat:
            raise MooringError(f"the state does not fit: {key!r} is missing")
        if flat[key].shape != to_dtensor(like, fresh.parameter).shape:
            have, want = tuple(flat[key].shape), tuple(to_dtensor(like, fresh.parameter).shape)
            raise MooringError(f"the state does not fit: {key!r} has shape {have}, the model needs {want}")
        part = local_part(flat[key].detach(), fresh.parameter)
        found[slot] = like.copy_(part) if slot == "anchor" else part.to(like, copy=True)  # where anchors are kept
    anchor = found.pop("anchor")
    factor = None
    if fresh.factor:
        inputs, outputs, past_inputs, past_outputs = (found.pop(slot) for slot in fresh.factor.slots())
        factor = Factor(inputs, outputs, past_inputs, past_outputs)
    return ParameterState(name, fresh.parameter, anchor, found, _previous(flat, fresh, memory), count, factor)


def _previous(flat: Mapping[str, Tensor], fresh: ParameterState, memory: Memory) -> Tensor | QuantizedImportance | None:
    """The importance over past tasks: as it was saved where that is how it is kept, else made so."""
    name, theta = fresh.name, fresh.theta
    previous = flat.get(f"previous.{name}")
    if previous is None:
        return None
    if previous.shape not in (fresh.parameter.shape, torch.Size(())):
        raise MooringError(f"the state does not fit: 'previous.{name}' has shape {tuple(previous.shape)}")
    code = local_part(previous.detach(), fresh.parameter).to(theta.device, copy=True)
    if code.dtype != torch.uint8:
        return memory.kept(code, theta)
    block = block_of(theta.shape)
    shape = (*fresh.parameter.shape[:1], fresh.parameter.shape[1:].numel() // (block or 1))
    blocks = []
    for slot in BLOCKS:
        each = flat.get(f"{slot}.{name}")
        if block is None or each is None or each.shape != shape:
            raise MooringError(f"the state does not fit: '{slot}.{name}' is missing, or not of shape {shape}")
        blocks.append(
            local_part(each.detach(), fresh.parameter, rows=True).to(theta.device, compute_dtype_of(theta), copy=True)
        )
    coded = QuantizedImportance(code, *blocks)
    return coded if memory.previous == "8bit" else memory.kept(coded.values(), theta)


def check_keys(flat: Mapping[str, Tensor], moored: Collection[ParameterState], unread: Collection[str] = ()) -> None:
    """Refuse entries that nothing asked for: they belong to other options or another model.

    Args:
        flat: the state.
        moored: what was read from it.
        unread: what of a task is not kept, and may be there.
    """
    known = {HEADER, *(f"{slot}.{m.name}" for m in moored for slot in {*m.slots(), *PAST, *unread})}
    left = sorted(key for key in flat if key not in known and not key.startswith("buffer."))
    if left:
        raise MooringError(f"the state does not fit: nothing here takes {', '.join(map(repr, left))}")
