"""Checkpoints of a fleet: everything needed to continue it, in one safetensors file."""

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor

from mooring.curvature.kronecker_factors import FACTOR_SLOTS, KroneckerFactors
from mooring.errors import MooringError
from mooring.state.parameter_state import ParameterState
from mooring_lab.fleet.fleet import Fleet, Position
from mooring_lab.fleet.method_groups import rows_of
from mooring_lab.fleet.method_state import MethodState
from mooring_lab.fleet.record import RunRecord
from mooring_lab.fleet.stack.stack import to_stack_layout
from mooring_lab.methods import find_method
from mooring_lab.model.atomic_files import write_atomically
from mooring_lab.model.results import Result
from mooring_lab.model.spec import RunSpec

VERSION = 2
"""The version of the file layout. Checkpoints of any other version are refused."""

Header = dict[str, Any]
Tensors = dict[str, Tensor]


class CheckpointError(MooringError):
    """A checkpoint that cannot be continued."""


class CheckpointVersionError(MooringError):
    """A checkpoint of another version. It is not damaged, so its runs are not started again."""


def size(fleet: Fleet) -> int:
    """Return about how many bytes a checkpoint of the fleet takes."""
    return sum(tensor.nbytes for tensor in _tensors_of(fleet).values())


def save(fleet: Fleet, path: Path) -> None:
    """Write a checkpoint of the fleet. An existing file is replaced as a whole or not at all."""
    tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in _tensors_of(fleet).items()}
    header = {
        "version": VERSION,
        "runs": [spec.key for spec in fleet.specs],
        "twins": {key: [spec.to_json() for spec in group] for key, group in fleet.strength_groups.items()},
        "books": [record.to_json() for record in fleet.records],
        "results": [result.to_json() for result in fleet.results],
        "position": asdict(fleet.position),
        "steps": fleet.steps,
        "seconds": fleet.seconds,
        "calls": fleet.stack.calls,
        "memory": None if fleet.memory is None else [fleet.memory.offered, fleet.memory.drawn],
        "groups": [_method_header(state) for _, state in fleet.groups.moored],
        "reference": None if fleet.reference is None else fleet.reference.sizes(),
    }
    _write(path, header, tensors)


def _tensors_of(fleet: Fleet) -> Tensors:
    """Return every tensor of a checkpoint, by its name in the file."""
    # "bad" is saved because a run may have failed without being removed yet
    tensors: Tensors = {"curve": fleet.loss_history.sums, "bad": fleet.first_bad}
    for kind, own in _tensors_by_kind(fleet).items():
        tensors |= {f"{kind}/{name}": tensor for name, tensor in own.items()}
    for number, (_, method) in enumerate(fleet.groups.moored):
        tensors[f"held/{number}/mu"] = method.mu
        tensors |= {} if method.scale is None else {f"held/{number}/scale": method.scale}
        for name, state in method.states.items():
            tensors |= {f"held/{number}/{name}/{slot}": tensor for slot, tensor in state.slots().items()}
    return tensors


def restore(fleet: Fleet, path: Path) -> None:
    """Bring a new fleet to the saved state of its runs; the checkpoint may contain further runs.

    Raises:
        CheckpointError: if the file is damaged or does not contain the runs.
        CheckpointVersionError: if another version wrote the file.
    """
    with _open(path) as (header, file):
        runs = {spec.key for group in fleet.strength_groups.values() for spec in group}
        _restore_fleet(fleet, *_select_runs(header, _read_tensors(header, file, path), runs, path))


def split(path: Path, parts: Mapping[Path, Collection[str]]) -> int:
    """Split a checkpoint into one file for each part of its runs, without moving tensors to a device.

    Args:
        path: the checkpoint of all runs; it is kept.
        parts: the keys of the runs in each new file.

    Returns:
        The number of steps that each run has taken.

    Raises:
        CheckpointError: if the file is damaged or does not contain the runs.
        CheckpointVersionError: if another version wrote the file.
    """
    with _open(path) as (header, file):
        tensors = _read_tensors(header, file, path)
        selected = {target: _select_runs(header, tensors, set(runs), path) for target, runs in parts.items()}
    for target, (own_header, own_tensors) in selected.items():
        _write(target, own_header, own_tensors)
    return int(header["steps"])


def _restore_fleet(fleet: Fleet, header: Header, tensors: Tensors) -> None:
    if not header["twins"]:
        fleet.expand_strength_groups()
    rows = {spec.key: row for row, spec in enumerate(fleet.specs)}
    fleet.strength_groups = {key: group for key, group in fleet.strength_groups.items() if key in header["runs"]}
    fleet.keep(torch.tensor([rows[key] for key in header["runs"]], dtype=torch.int64, device=fleet.device))
    _restore_tensors(fleet, tensors)
    for number, ((rows_of_method, method), own) in enumerate(zip(fleet.groups.moored, header["groups"], strict=True)):
        parameters = rows_of(fleet.stack.parameters, rows_of_method)
        _restore_method(method, parameters, own, _with_prefix(tensors, f"held/{number}/"))
    fleet.records = [RunRecord.from_json(record) for record in header["books"]]
    fleet.results = [Result.from_json(result) for result in header["results"]]
    fleet.position = Position(**header["position"])
    fleet.steps, fleet.seconds, fleet.stack.calls = header["steps"], header["seconds"], header["calls"]
    if fleet.memory is not None:
        fleet.memory.offered, fleet.memory.drawn = header["memory"]
    if fleet.reference is not None:
        saved = _with_prefix(tensors, "reference/")
        fleet.reference.load(header["reference"], {name: t.to(fleet.device) for name, t in saved.items()})
    if fleet.projection is not None:
        saved = _with_prefix(tensors, "projection/")
        fleet.projection.load({name: t.to(fleet.device) for name, t in saved.items()})


def runs_in(path: Path) -> set[str]:
    """Return the keys of the runs in a checkpoint, including failed runs."""
    with _open(path) as (header, _):
        return _run_keys(header)


def steps_in(path: Path) -> int:
    """Return how many steps the runs of a checkpoint have taken."""
    with _open(path) as (header, _):
        return int(header["steps"])


def _run_keys(header: Header) -> set[str]:
    return {run["key"] for runs in _runs_by_row(header) for run in runs} | {*map(_result_key, header["results"])}


def _runs_by_row(header: Header) -> list[list[dict[str, Any]]]:
    """Return key and spec of the runs of each row: one run, or a strength group in its first task."""
    groups = header["twins"]
    specs = [groups.get(key, [record["spec"]]) for key, record in zip(header["runs"], header["books"], strict=True)]
    return [[{"key": RunSpec.from_json(spec).key, "spec": spec} for spec in row] for row in specs]


def _result_key(result: dict[str, Any]) -> str:
    return Result.from_json(result).spec.key


def _read_tensors(header: Header, file: Any, path: Path) -> Tensors:
    # cloned, because the tensors of a file may be unaligned, and sums over unaligned memory differ in the last bit
    tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    if _digest(tensors) != header["digest"]:
        raise CheckpointError(f"the checkpoint {path} is damaged: delete it to start its runs again")
    return tensors


def _select_runs(header: Header, tensors: Tensors, runs: set[str], path: Path) -> tuple[Header, Tensors]:
    """Reduce a checkpoint to some of its runs; the tensors of a method's state have rows of their own."""
    if not runs <= _run_keys(header):
        raise CheckpointError(f"the checkpoint {path} is of other runs: delete it to start again")
    if runs == _run_keys(header):
        return header, tensors
    selected = [[run for run in row if run["key"] in runs] for row in _runs_by_row(header)]
    rows = [row for row, members in enumerate(selected) if members]
    kept_tensors = {name: tensor[rows] for name, tensor in tensors.items() if not name.startswith("held/")}
    groups: list[dict[str, Any]] = []
    for number, (group, span) in enumerate(zip(header["groups"], _method_rows(header), strict=True)):
        if own_rows := [row - span.start for row in rows if row in span]:
            held = _with_prefix(tensors, f"held/{number}/")
            kept_tensors |= {f"held/{len(groups)}/{name}": tensor[own_rows] for name, tensor in held.items()}
            groups.append(group)
    first = {row: selected[row][0] for row in rows}  # the first selected run of a strength group represents it
    kept: Header = {
        "runs": [run["key"] for run in first.values()],
        "books": [header["books"][row] | {"spec": run["spec"]} for row, run in first.items()],
        "results": [result for result in header["results"] if _result_key(result) in runs],
        "groups": groups,
    }
    if header["twins"]:
        kept["twins"] = {run["key"]: [member["spec"] for member in selected[row]] for row, run in first.items()}
    return header | kept, kept_tensors


def _method_rows(header: Header) -> list[range]:
    """Return the rows of each method that has an importance, in the order of the header's groups."""
    spans, begin = [], 0
    for name, records in groupby(header["books"], key=lambda record: find_method(record["spec"]["method"]).name):
        span = range(begin, begin + len(list(records)))
        begin = span.stop
        if find_method(name).importance is not None:
            spans.append(span)
    return spans


def _write(path: Path, header: Header, tensors: Tensors) -> None:
    text = json.dumps(header | {"digest": _digest(tensors)})
    write_atomically(path, to_bytes(tensors, metadata={"mooring": text}))


def _digest(tensors: Tensors) -> str:
    """Return a digest of names and bytes, which detects bits that flipped on the disk."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


@contextmanager
def _open(path: Path) -> Iterator[tuple[Header, Any]]:
    """Open a checkpoint: its header, and the file to read tensors from."""
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {})["mooring"])
            if (version := int(header["version"])) != VERSION:
                raise CheckpointVersionError(
                    f"the checkpoint {path} has version {version}, this Mooring reads {VERSION}: "
                    "continue it with the Mooring that wrote it, or delete it"
                )
            yield header, file
    except (CheckpointError, CheckpointVersionError):
        raise
    except (OSError, SafetensorError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"the checkpoint {path} cannot be read: delete it to start its runs again") from error


def _tensors_by_kind(fleet: Fleet) -> dict[str, Tensors]:
    """Return the named tensors of a fleet, by their prefix in the file."""
    return {
        "parameter": fleet.stack.parameters,
        "buffer": fleet.stack.buffers,
        "statistics": fleet.statistics.anchors,
        **fleet.optimizer.state,
        "first": fleet.first,
        "memory": {} if fleet.memory is None else {"kept": fleet.memory.kept},
        "dark": {} if fleet.dark is None else {"logits": fleet.dark.logits},
        "teacher": {} if fleet.lwf is None else fleet.lwf.teacher,
        "reference": {} if fleet.reference is None else fleet.reference.tensors(),
        "projection": {} if fleet.projection is None else fleet.projection.tensors(),
    }


def _restore_tensors(fleet: Fleet, tensors: Tensors) -> None:
    kinds, device = _tensors_by_kind(fleet), fleet.device
    saved = {kind: {n: t.to(device) for n, t in _with_prefix(tensors, f"{kind}/").items()} for kind in kinds}
    for kind in ("parameter", "buffer"):
        if {n: t.shape for n, t in saved[kind].items()} != {n: t.shape for n, t in kinds[kind].items()}:
            raise KeyError(kind)
    # in the network's order, not the file's: sums over parameters depend on it in the last bit
    names = [*fleet.stack.parameters, *fleet.stack.buffers]
    fleet.stack.parameters = {name: to_stack_layout(saved["parameter"][name]) for name in fleet.stack.parameters}
    fleet.stack.buffers = {name: saved["buffer"][name] for name in fleet.stack.buffers}
    fleet.statistics.anchors = {name: saved["statistics"][name] for name in names if name in saved["statistics"]}
    in_order = {kind: [name for name in names if name in saved[kind]] for kind in kinds}
    for slot in fleet.optimizer.state:
        fleet.optimizer.state[slot] = {name: to_stack_layout(saved[slot][name]) for name in in_order[slot]}
    fleet.first = {name: to_stack_layout(saved["first"][name]) for name in in_order["first"]}
    fleet.loss_history.sums, fleet.first_bad = tensors["curve"].to(device), tensors["bad"].to(device)
    if fleet.memory is not None:
        fleet.memory.kept = saved["memory"]["kept"].cpu()
    if fleet.dark is not None:
        fleet.dark.logits = saved["dark"]["logits"]
    if fleet.lwf is not None:
        fleet.lwf.teacher = {name: to_stack_layout(saved["teacher"][name]) for name in names if saved["teacher"]}


def _method_header(method: MethodState) -> dict[str, Any]:
    counts = {name: state.count for name, state in method.states.items()}
    factors = {name: [s.factors.count, s.factors.tasks] for name, s in method.states.items() if s.factors}
    return {"tasks": method.tasks, "steps": method.steps, "counts": counts, "factors": factors}


def _restore_method(method: MethodState, parameters: Tensors, header: dict[str, Any], tensors: Tensors) -> None:
    method.tasks, method.steps = header["tasks"], header["steps"]
    method.mu = tensors["mu"].to(method.mu.device)
    method.scale = None if method.scale is None else tensors["scale"].to(method.mu.device)
    for name, count in header["counts"].items():
        saved = _with_prefix(tensors, f"{name}/").items()
        slots = {slot: to_stack_layout(tensor.to(method.mu.device)) for slot, tensor in saved}
        anchor, previous = slots.pop("anchor"), slots.pop("previous", None)
        factors = None
        if counts := header["factors"].get(name):
            inputs, outputs, past_inputs, past_outputs = (slots.pop(slot) for slot in FACTOR_SLOTS)
            count_of_factors, tasks = counts
            factors = KroneckerFactors(inputs, outputs, past_inputs, past_outputs, count_of_factors, tasks, runs=True)
            factors.update_eigenbasis()
        method.states[name] = ParameterState(name, parameters[name], anchor, slots, previous, count, factors, runs=True)


def _with_prefix(tensors: Tensors, prefix: str) -> Tensors:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
