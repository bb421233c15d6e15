"""A mooring's state as a flat dictionary of tensors for `torch.save` and safetensors, and reading it back.

A state that does not fit the model or the options is refused before anything is changed.
"""

import json
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from mooring.curvature.kronecker_factors import FACTOR_SLOTS, update_eigenbases
from mooring.curvature.low_rank import Product, check_same_layers, sample_layer
from mooring.distributed.dtensor import local_part, to_dtensor
from mooring.errors import MooringError, warn
from mooring.rules import State
from mooring.state.displacement import displaced
from mooring.state.memory import Memory
from mooring.state.mooring_state import PREVIOUS_SLOTS, MooringState
from mooring.state.parameter_state import ParameterState, compute_dtype_of
from mooring.state.quantization import BLOCK_SLOTS, QuantizedImportance, block_size
from mooring.state.selection import norm_buffers

VERSION, QUANTIZED_VERSION = 1, 2
"""The versions of the layout: with importances as plain tensors, and with quantized ones. Others are refused."""

REQUIRED_KEYS = ("importance", "options", "merge", "tasks", "steps", "moored", "factors", "pull", "buffers", "counts")
"""The keys that every header has."""

HEADER = "mooring"


def describe_states(states: MooringState) -> dict[str, Any]:
    """Return what a saved state says of all parameters together, as plain values."""
    return {
        "tasks": states.tasks,
        "steps": states.steps,
        "moored": sorted(states.names.values()),
        "factors": {s.name: s.factors.header() for s in states.records.values() if s.factors},
        **({"adapters": _describe_products(states)} if states.products else {}),
        **({} if states.memory.accumulates else {"accumulates": False}),
        **({"not_estimated": sorted(states.not_estimated)} if states.not_estimated else {}),
    }


def _describe_products(states: MooringState) -> dict[str, Any]:
    """Return what a saved state says of the low-rank products: their options, scales and base layers."""
    assert isinstance(states.adapters, Product)
    held = {states.names[b]: product for b, product in states.products.by_b.items() if b in states.records}
    return {
        "largest": states.adapters.largest,
        "damping": states.adapters.damping,
        "dtype": str(states.adapters.dtype or "").removeprefix("torch."),
        "scales": {name: product.scale for name, product in held.items()},
        "layers": {name: sample_layer(product.layer) for name, product in held.items() if product.is_active()},
    }


def pack_state(states: Collection[ParameterState], buffers: Mapping[str, Tensor], header: dict[str, Any]) -> State:
    """Return the flat dictionary: `slot.parameter`, `buffer.name`, and a header of JSON bytes."""
    quantized = any(isinstance(state.previous, QuantizedImportance) for state in states)
    counts = {state.name: state.count for state in states}
    header = {"version": QUANTIZED_VERSION if quantized else VERSION, **header, "counts": counts}
    flat = {HEADER: torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)}
    for state in states:
        for slot, tensor in state.slots().items():
            kept = tensor.contiguous()
            if slot not in FACTOR_SLOTS:
                kept = to_dtensor(kept, state.parameter, rows=slot in BLOCK_SLOTS)
            flat[f"{slot}.{state.name}"] = kept
    return flat | {f"buffer.{name}": tensor for name, tensor in buffers.items()}


def read_header(flat: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the header; refuse what is not the state of a Mooring, and other versions."""
    try:
        header = json.loads(bytes(flat[HEADER].tolist()))
        version = header["version"]
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise MooringError(
            f"this is not the state of a Mooring, because it has no readable {HEADER!r} entry: give what "
            "moor.state_dict() returned, not the whole checkpoint"
        ) from error
    if version not in (VERSION, QUANTIZED_VERSION):
        raise MooringError(
            f"the state has version {version}, this Mooring reads {VERSION} and {QUANTIZED_VERSION}: "
            "load it with the Mooring that wrote it"
        )
    if missing := [key for key in REQUIRED_KEYS if key not in header]:
        raise MooringError(f"the state is damaged: its header has no {', '.join(map(repr, missing))}")
    return dict(header)


def read_state(flat: State, states: MooringState) -> tuple[dict[str, Any], dict[Tensor, ParameterState], State]:
    """Read a state for a model: its header, the states of parameters, and the anchors of normalization statistics.

    Args:
        flat: the dictionary that `Mooring.state_dict` returned.
        states: the states of the model that continues from it; left as they are.
    """
    header = read_header(flat)
    states.refresh()
    by_name = {name: p for p, name in states.names.items()}
    saved = {*header["moored"], *header["counts"]}
    only_state, only_model = saved - by_name.keys(), by_name.keys() - saved
    if only_state or only_model:
        raise MooringError(
            f"the state does not fit: only in the state {sorted(only_state)}, only in the model "
            f"{sorted(only_model)}; build the model, its heads and exclude= as they were when it was saved"
        )
    if "adapters" in header:
        check_same_layers(header["adapters"], states.products, states.names)
    records: dict[Tensor, ParameterState] = {}
    memory, unused_slots = states.memory, set[str]()
    for name, count in header["counts"].items():
        p = by_name[name]
        new = states.new_state(p, header["tasks"])
        if name not in header["factors"]:
            states.to_scores(new)
        elif not new.factors:
            new.factors = states.new_factors(p)
            new.importance_state = states.no_scores(p)
        if new.factors and f"current.{name}" in flat and flat[f"current.{name}"].ndim:  # not observed so far
            new.importance_state = states.start_importance(p, header["tasks"])
        if not memory.accumulates and not new.factors and p not in states.products:
            started = states.start_importance(p, header["tasks"])
            if count and not header["steps"] and f"current.{name}" in flat:
                new.importance_state = started  # estimated, and not yet consolidated
            unused_slots |= started.keys()
        _read_parameter(flat, new, count, memory, accumulated=header.get("accumulates", True))
        if new.factors:
            new.factors.count, new.factors.tasks, *scale = header["factors"][name]
            if scale:  # G of a task whose budget was calibrated was saved without its factor
                new.factors.store(new.factors.past_factor("inputs"), new.factors.past_factor("outputs") * scale[0])
            if p not in states.with_factors and p not in states.products:
                states.to_scores(new)
        records[p] = new
    update_eigenbases(state.factors for state in records.values() if state.factors)
    states.join_products(records)
    _check_all_keys_are_used(flat, records.values(), unused_slots)
    if header["tasks"] and not header["steps"]:
        _warn_of_other_weights(records)
    known = norm_buffers(states.model, states.exclude, states.optimizer_parameters())
    anchors = {key.removeprefix("buffer."): t for key, t in flat.items() if key.startswith("buffer.")}
    for name, tensor in anchors.items():
        if name not in known or tensor.shape != known[name].shape:
            raise MooringError(f"the state does not fit: the model has no buffer {name!r} of that shape")
    return header, records, {name: t.to(known[name], copy=True) for name, t in anchors.items()}


def _read_parameter(
    flat: Mapping[str, Tensor], new: ParameterState, count: int, memory: Memory, *, accumulated: bool
) -> None:
    """Fill a new state of one parameter, which says what slots there are and of which shapes.

    Tensors are stored as `memory` says, in whatever form they were saved. If the saved state did not accumulate, there
    is nothing of a task that has not begun, and the importance starts again from its first values.
    """
    for slot, like in new.slots().items():
        if slot in new.importance_state and not accumulated and not count:
            continue
        key = f"{slot}.{new.name}"
        if key not in flat:
            raise MooringError(f"the state does not fit: {key!r} is missing")
        want = like.shape if slot in FACTOR_SLOTS else to_dtensor(like, new.parameter).shape
        if flat[key].shape != want:
            have = tuple(flat[key].shape)
            raise MooringError(f"the state does not fit: {key!r} has shape {have}, the model needs {tuple(want)}")
        saved = flat[key].detach()
        if slot in FACTOR_SLOTS:
            setattr(new.factors, slot, saved.to(like, copy=True))
        elif slot == "anchor":
            like.copy_(local_part(saved, new.parameter))  # it may be offloaded
        else:
            new.importance_state[slot] = local_part(saved, new.parameter).to(like, copy=True)
    new.previous, new.count = _read_previous(flat, new, memory), count


def _read_previous(
    flat: Mapping[str, Tensor], new: ParameterState, memory: Memory
) -> Tensor | QuantizedImportance | None:
    """Return the importance over past tasks in the form that `memory` says."""
    name, theta = new.name, new.theta
    previous = flat.get(f"previous.{name}")
    if previous is None:
        return None
    if previous.shape not in (new.parameter.shape, torch.Size(())):
        raise MooringError(f"the state does not fit: 'previous.{name}' has shape {tuple(previous.shape)}")
    values = local_part(previous.detach(), new.parameter).to(theta.device, copy=True)
    if values.dtype != torch.uint8:
        return memory.store_previous(values, theta)
    block = block_size(theta.shape)
    shape = (*new.parameter.shape[:1], new.parameter.shape[1:].numel() // (block or 1))
    blocks = []
    for slot in BLOCK_SLOTS:
        tensor = flat.get(f"{slot}.{name}")
        if block is None or tensor is None or tensor.shape != shape:
            raise MooringError(f"the state does not fit: '{slot}.{name}' is missing, or not of shape {shape}")
        part = local_part(tensor.detach(), new.parameter, rows=True)
        blocks.append(part.to(theta.device, compute_dtype_of(theta), copy=True))
    quantized = QuantizedImportance(values, *blocks)
    return quantized if memory.previous == "8bit" else memory.store_previous(quantized.values(), theta)


def _check_all_keys_are_used(
    flat: Mapping[str, Tensor], states: Collection[ParameterState], unused_slots: Collection[str]
) -> None:
    """Refuse entries that belong to other options or another model, except those of slots that are not kept here."""
    known = {f"{slot}.{state.name}" for state in states for slot in {*state.slots(), *PREVIOUS_SLOTS, *unused_slots}}
    unknown = sorted(key for key in flat if key not in {HEADER, *known} and not key.startswith("buffer."))
    if unknown:
        raise MooringError(f"the state does not fit: nothing here takes {', '.join(map(repr, unknown))}")


def _warn_of_other_weights(records: dict[Tensor, ParameterState]) -> None:
    """Warn if a parameter is not at its anchor right after a task: it would be pulled to other weights."""
    if names := displaced(records.values()):
        warn(
            f"the model's weights differ from those that the state was saved with, such as {names[0]!r}: load the "
            "model's weights first, or training pulls it towards the saved ones",
        )
