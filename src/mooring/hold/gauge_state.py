"""Gauges in a saved state: their batches, as a tree of tensors and plain values, and the stored predictions."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from mooring.errors import MooringError
from mooring.hold.measure import Gauge
from mooring.reference.batches import Loss, Outputs
from mooring.reference.kinds import KINDS, Classes, OutputKind, Own
from mooring.reference.mixtures import MixedBatches
from mooring.rules import State

PREFIX = "gauge."
"""How the keys of these tensors begin in a state."""


def pack_gauges(gauges: Mapping[str, Gauge]) -> tuple[dict[str, Any], State]:
    """Return the description of gauges, by name, and their tensors.

    Example:
        >>> import torch
        >>> description, tensors = pack_gauges({"0": Gauge([torch.zeros(2, 3)])})
        >>> description["0"]["batches"], list(tensors)
        ([{'tensor': 'gauge.0.0'}], ['gauge.0.0'])
    """
    flat: State = {}
    description: dict[str, dict[str, Any]] = {}
    for name, gauge in gauges.items():
        batches, targets = [], []
        mixed = gauge.batches if isinstance(gauge.batches, MixedBatches) else MixedBatches(gauge.batches, 0)
        for index, batch in enumerate(mixed.own):  # mixtures are made again
            batches.append(_pack(batch, f"{PREFIX}{name}.{index}", flat))
        for index, target in enumerate(gauge.targets):
            targets.append(_pack(target, f"{PREFIX}{name}.{index}.target", flat))
        description[name] = {"loss": gauge.loss is not None, "batches": batches, "targets": targets}
        description[name] |= {"kind": gauge.kind.name, "whole": gauge.whole}
        description[name]["options"] = _pack(gauge.kind.state(), f"{PREFIX}{name}.kind", flat)
        description[name] |= {"settings": gauge.settings, "rounds": mixed.rounds}
    return description, flat


def unpack_gauges(
    description: Mapping[str, Any],
    flat: State,
    loss: Loss | None,
    outputs: Outputs | None,
    kind: OutputKind | None = None,
) -> dict[str, Gauge] | None:
    """Return the gauges of a state; None if they measure a loss and none is given.

    Args:
        description: what `pack_gauges` described.
        flat: the tensors of the state.
        loss: the loss of `attach`.
        outputs: its function of outputs.
        kind: its kind, which a state does not contain if it is a function.
    """
    gauges = {}
    for name, entry in description.items():
        if entry["loss"] and loss is None:
            return None
        batches: Sequence[Any] = [_unpack(tree, flat) for tree in entry["batches"]]
        if rounds := entry.get("rounds", 0):
            batches = MixedBatches(batches, rounds)
        own_kind = _unpack_kind(entry, flat, kind)
        own_loss = loss if entry["loss"] else None
        gauge = gauges[name] = Gauge(batches, own_loss, outputs, own_kind, whole=entry.get("whole", False))
        gauge.settings = entry["settings"]
        for tree in entry["targets"]:
            target = _unpack(tree, flat)
            gauge.targets.append(target if isinstance(target, float) else tuple(t for t in target if t is not None))
    return gauges


def _unpack_kind(entry: Mapping[str, Any], flat: State, kind: OutputKind | None) -> OutputKind:
    """Return the kind of a saved gauge; a state of an earlier version has classes."""
    name = entry.get("kind", Classes.name)
    if name == Own.name:
        if not isinstance(kind, Own):
            raise MooringError("the state was made with a divergence of your own: give attach the same kind= again")
        return kind
    return KINDS[name](**_unpack(entry["options"], flat) if "options" in entry else {})


def _pack(value: Any, key: str, flat: State) -> Any:
    """Return a value with its tensors replaced by their keys, under which they are added to `flat`."""
    if isinstance(value, Tensor):
        flat[key] = value.detach().clone()  # labels may be the inputs themselves, which safetensors refuses
        return {"tensor": key}
    if isinstance(value, Mapping):
        return {"mapping": [[str(name), _pack(part, f"{key}.{name}", flat)] for name, part in value.items()]}
    if isinstance(value, tuple | list):
        return {"list": [_pack(part, f"{key}.{index}", flat) for index, part in enumerate(value)]}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    raise MooringError(
        f"a batch of the gauge contains a {type(value).__name__}, which cannot be saved: give batches of tensors, or "
        "save state_dict(gauge=False)"
    )


def _unpack(tree: Any, flat: State) -> Any:
    if "tensor" in tree:
        if tree["tensor"] not in flat:
            raise MooringError(f"the state does not fit: {tree['tensor']!r} is missing")
        return flat[tree["tensor"]].detach().clone()
    if "mapping" in tree:
        return {name: _unpack(part, flat) for name, part in tree["mapping"]}
    if "list" in tree:
        return [_unpack(part, flat) for part in tree["list"]]
    return tree["value"]
