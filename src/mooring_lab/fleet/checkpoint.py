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

from mooring.errors import MooringError
from mooring_lab.fleet.fleet import Fleet
from mooring_lab.fleet.fleet_callback import Position
from mooring_lab.fleet.learner_plugin import PluginState, Tensors
from mooring_lab.fleet.record import RunRecord
from mooring_lab.fleet.stack.stack import to_stack_layout
from mooring_lab.model.atomic_files import write_atomically
from mooring_lab.model.known_methods import find_method
from mooring_lab.model.results import Result
from mooring_lab.model.spec import RunSpec

VERSION = 3
"""The version of the file layout. Checkpoints of any other version are refused."""

Header = dict[str, Any]


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
        "strength_groups": {key: [spec.to_json() for spec in group] for key, group in fleet.strength_groups.items()},
        "records": [record.to_json() for record in fleet.measured.records],
        "results": [result.to_json() for result in fleet.measured.results],
        "position": asdict(fleet.position),
        "steps": fleet.steps,
        "seconds": fleet.seconds,
        "calls": fleet.stack.calls,
        "plugins": {plugin.key: plugin.state_dict().values for plugin in fleet.plugins},
        "groups": [group.values for group in _groups_of(fleet)],
    }
    _write(path, header, tensors)


def _tensors_of(fleet: Fleet) -> Tensors:
    """Return every tensor of a checkpoint, by its name in the file."""
    # "first_bad" is saved because a run may have failed without being removed yet
    tensors: Tensors = {"first_bad": fleet.first_bad}
    kinds = {"parameter": fleet.stack.parameters, "buffer": fleet.stack.buffers}
    kinds |= {f"optimizer/{slot}": own for slot, own in fleet.optimizer.state.items()}
    kinds |= {f"plugin/{plugin.key}": plugin.state_dict().tensors for plugin in fleet.plugins}
    kinds |= {f"group/{number}": group.tensors for number, group in enumerate(_groups_of(fleet))}
    for kind, own in kinds.items():
        tensors |= {f"{kind}/{name}": tensor for name, tensor in own.items()}
    return tensors


def _groups_of(fleet: Fleet) -> list[PluginState]:
    """Return the states of each method's own runs; one plugin has them."""
    return [group for plugin in fleet.plugins for group in plugin.state_dict().groups]


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
    if not header["strength_groups"]:
        fleet.expand_strength_groups()
    rows = {spec.key: row for row, spec in enumerate(fleet.specs)}
    fleet.strength_groups = {key: group for key, group in fleet.strength_groups.items() if key in header["runs"]}
    fleet.keep(torch.tensor([rows[key] for key in header["runs"]], dtype=torch.int64, device=fleet.device))
    _restore_tensors(fleet, tensors)
    fleet.measured.records = [RunRecord.from_json(record) for record in header["records"]]
    fleet.measured.results = [Result.from_json(result) for result in header["results"]]
    fleet.position = Position(**header["position"])
    fleet.steps, fleet.seconds, fleet.stack.calls = header["steps"], header["seconds"], header["calls"]
    groups = [PluginState(_below(tensors, f"group/{n}/"), values) for n, values in enumerate(header["groups"])]
    for plugin in fleet.plugins:
        own = PluginState(_below(tensors, f"plugin/{plugin.key}/"), header["plugins"][plugin.key], groups)
        plugin.load_state_dict(fleet, own)


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
    groups = header["strength_groups"]
    specs = [groups.get(key, [record["spec"]]) for key, record in zip(header["runs"], header["records"], strict=True)]
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
    """Reduce a checkpoint to some of its runs; the tensors of a method's own runs have rows of their own."""
    if not runs <= _run_keys(header):
        raise CheckpointError(f"the checkpoint {path} is of other runs: delete it to start again")
    if runs == _run_keys(header):
        return header, tensors
    selected = [[run for run in row if run["key"] in runs] for row in _runs_by_row(header)]
    rows = [row for row, members in enumerate(selected) if members]
    kept_tensors = {name: tensor[rows] for name, tensor in tensors.items() if not name.startswith("group/")}
    groups: list[dict[str, Any]] = []
    for number, (group, span) in enumerate(zip(header["groups"], _method_rows(header), strict=True)):
        if own_rows := [row - span.start for row in rows if row in span]:
            own = _below(tensors, f"group/{number}/")
            kept_tensors |= {f"group/{len(groups)}/{name}": tensor[own_rows] for name, tensor in own.items()}
            groups.append(group)
    first = {row: selected[row][0] for row in rows}  # the first selected run of a strength group represents it
    kept: Header = {
        "runs": [run["key"] for run in first.values()],
        "records": [header["records"][row] | {"spec": run["spec"]} for row, run in first.items()],
        "results": [result for result in header["results"] if _result_key(result) in runs],
        "groups": groups,
    }
    if header["strength_groups"]:
        members = {run["key"]: [member["spec"] for member in selected[row]] for row, run in first.items()}
        kept["strength_groups"] = members
    return header | kept, kept_tensors


def _method_rows(header: Header) -> list[range]:
    """Return the rows of each method, in the order of the header's groups."""
    spans, begin = [], 0
    for _, records in groupby(header["records"], key=lambda record: find_method(record["spec"]["method"]).name):
        spans.append(range(begin, begin + len(list(records))))
        begin = spans[-1].stop
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


def _restore_tensors(fleet: Fleet, tensors: Tensors) -> None:
    """Put parameters, buffers and the optimizer's tensors into a fleet."""
    stack, device = fleet.stack, fleet.device
    for kind, own in (("parameter", stack.parameters), ("buffer", stack.buffers)):
        if {n: t.shape for n, t in _below(tensors, f"{kind}/").items()} != {n: t.shape for n, t in own.items()}:
            raise KeyError(kind)

    def saved(kind: str) -> Tensors:
        # in the network's order, not the file's: sums over parameters depend on it in the last bit
        own = _below(tensors, f"{kind}/")
        return {name: own[name].to(device) for name in [*stack.parameters, *stack.buffers] if name in own}

    stack.parameters = {name: to_stack_layout(t) for name, t in saved("parameter").items()}
    stack.buffers = saved("buffer")
    for slot in fleet.optimizer.state:
        fleet.optimizer.state[slot] = {n: to_stack_layout(t) for n, t in saved(f"optimizer/{slot}").items()}
    fleet.first_bad = tensors["first_bad"].to(device)


def _below(tensors: Tensors, prefix: str) -> Tensors:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
