"""A fleet on disk: everything to continue it from, in one safetensors file."""

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

from mooring.errors import MooringError
from mooring.importance.kronecker_factors import FACTORS, Factor
from mooring.lab.fleet.fleet import Fleet, Position
from mooring.lab.fleet.method_state import Held, Moorings
from mooring.lab.fleet.record import Logbook
from mooring.lab.fleet.stack.stack import laid_out
from mooring.lab.methods import find_method
from mooring.lab.model.atomic_files import write_atomically
from mooring.lab.model.results import Result
from mooring.lab.model.spec import RunSpec

__all__ = ["CheckpointError", "CheckpointVersionError", "restore", "runs_in", "save", "size", "split", "steps_in"]

VERSION = 2
"""The version of the file layout. Checkpoints of any other version are refused."""

Header = dict[str, Any]
Tensors = dict[str, Tensor]


class CheckpointError(MooringError):
    """A checkpoint that nothing can be continued from."""


class CheckpointVersionError(MooringError):
    """A checkpoint of another version. It is not damaged, so its runs are not started again."""


def size(fleet: Fleet) -> int:
    """How many bytes saving a fleet would write, about."""
    return sum(tensor.nbytes for tensor in _kept(fleet).values())


def save(fleet: Fleet, path: Path) -> None:
    """Write everything that the fleet's future depends on; the file is replaced whole or not at all."""
    tensors = _kept(fleet)
    whole = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    header = {
        "version": VERSION,
        "runs": [spec.key for spec in fleet.specs],
        "twins": {key: [spec.to_json() for spec in some] for key, some in fleet.twins.items()},
        "books": [book.to_json() for book in fleet.books],
        "results": [result.to_json() for result in fleet.results],
        "position": asdict(fleet.position),
        "steps": fleet.steps,
        "seconds": fleet.seconds,
        "calls": fleet.stack.calls,
        "memory": None if fleet.memory is None else [fleet.memory.offered, fleet.memory.drawn],
        "groups": [_told(moorings) for _, moorings in fleet.groups.moored],
    }
    _write(path, header, whole)


def _kept(fleet: Fleet) -> Tensors:
    """Every tensor that the fleet's future depends on, by what it is."""
    tensors: Tensors = {"curve": fleet.curve.sums, "bad": fleet.bad}  # a run may be lost and not yet taken out
    for kind, told in _kinds(fleet).items():
        tensors |= {f"{kind}/{name}": tensor for name, tensor in told.items()}
    for number, (_, moorings) in enumerate(fleet.groups.moored):
        tensors[f"held/{number}/mu"] = moorings.mu
        for name, held in moorings.held.items():
            tensors |= {f"held/{number}/{name}/{slot}": tensor for slot, tensor in held.slots().items()}
    return tensors


def restore(fleet: Fleet, path: Path) -> None:
    """Bring a fresh fleet to where its runs were saved, together or with others.

    Raises:
        CheckpointError: where the file is damaged, or of other runs.
        CheckpointVersionError: where it is of another version.
    """
    with _opened(path) as (header, opened):
        runs = {spec.key for some in fleet.twins.values() for spec in some}
        _bring(fleet, *_part(header, _tensors(header, opened, path), runs, path))


def split(path: Path, parts: Mapping[Path, Collection[str]]) -> int:
    """Write a checkpoint for each part of another's runs, none of them brought onto a device.

    Args:
        path: the checkpoint of all; it stays.
        parts: the keys of the runs that go into each new one.

    Returns:
        How many steps each run has behind it.

    Raises:
        CheckpointError: where the file is damaged, or of other runs.
        CheckpointVersionError: where it is of another version.
    """
    with _opened(path) as (header, opened):
        tensors = _tensors(header, opened, path)
        made = {target: _part(header, tensors, set(runs), path) for target, runs in parts.items()}
    for target, (told, own) in made.items():
        _write(target, told, own)
    return int(header["steps"])


def _bring(fleet: Fleet, header: Header, tensors: Tensors) -> None:
    if not header["twins"]:
        fleet.board()
    places = {spec.key: row for row, spec in enumerate(fleet.specs)}
    fleet.twins = {key: some for key, some in fleet.twins.items() if key in header["runs"]}
    fleet.keep(torch.tensor([places[key] for key in header["runs"]], dtype=torch.int64, device=fleet.device))
    _restore_tensors(fleet, tensors)
    for number, ((_, moorings), told) in enumerate(zip(fleet.groups.moored, header["groups"], strict=True)):
        _restore_moorings(moorings, told, _under(tensors, f"held/{number}/"), fleet.device)
    fleet.books = [Logbook.from_json(told) for told in header["books"]]
    fleet.results = [Result.from_json(told) for told in header["results"]]
    fleet.position = Position(**header["position"])
    fleet.steps, fleet.seconds, fleet.stack.calls = header["steps"], header["seconds"], header["calls"]
    if fleet.memory is not None:
        fleet.memory.offered, fleet.memory.drawn = header["memory"]


def runs_in(path: Path) -> set[str]:
    """The keys of the runs that a checkpoint continues, those among them that were lost on the way included."""
    with _opened(path) as (header, _):
        return _runs(header)


def steps_in(path: Path) -> int:
    """How many steps the runs of a checkpoint have behind them."""
    with _opened(path) as (header, _):
        return int(header["steps"])


def _runs(header: Header) -> set[str]:
    aboard = (spec["key"] for some in _rows(header) for spec in some)
    return {*aboard, *map(_lost, header["results"])}


def _rows(header: Header) -> list[list[dict[str, Any]]]:
    """For each row the runs that it stands for, by their key and spec: one, or twins in their first task."""
    twins = header["twins"]
    every = [twins.get(key, [book["spec"]]) for key, book in zip(header["runs"], header["books"], strict=True)]
    return [[{"key": RunSpec.from_json(spec).key, "spec": spec} for spec in some] for some in every]


def _lost(told: dict[str, Any]) -> str:
    """The key of a run that has its result already."""
    return Result.from_json(told).spec.key


def _tensors(header: Header, opened: Any, path: Path) -> Tensors:
    """Every tensor of a checkpoint, as it was written."""
    # copied, because a file's bytes begin anywhere, and sums over memory that is not aligned differ in the last bit
    tensors = {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118
    if _digest(tensors) != header["digest"]:
        raise CheckpointError(f"the checkpoint {path} is damaged: delete it to start its runs again")
    return tensors


def _part(header: Header, tensors: Tensors, runs: set[str], path: Path) -> tuple[Header, Tensors]:
    """The same for some of the runs: their rows, those of a method that moors out of its own tensors."""
    if not runs <= _runs(header):
        raise CheckpointError(f"the checkpoint {path} is of other runs: delete it to start again")
    if runs == _runs(header):
        return header, tensors
    every = [[run for run in some if run["key"] in runs] for some in _rows(header)]
    rows = [row for row, some in enumerate(every) if some]
    taken = {name: tensor[rows] for name, tensor in tensors.items() if not name.startswith("held/")}
    groups: list[dict[str, Any]] = []
    for number, (told, span) in enumerate(zip(header["groups"], _spans(header), strict=True)):
        if mine := [row - span.start for row in rows if row in span]:
            held = _under(tensors, f"held/{number}/")
            taken |= {f"held/{len(groups)}/{name}": tensor[mine] for name, tensor in held.items()}
            groups.append(told)
    first = {row: every[row][0] for row in rows}  # a row whose first run is not wanted goes on as its twin
    kept: Header = {
        "runs": [run["key"] for run in first.values()],
        "books": [header["books"][row] | {"spec": run["spec"]} for row, run in first.items()],
        "results": [told for told in header["results"] if _lost(told) in runs],
        "groups": groups,
    }
    if header["twins"]:
        kept["twins"] = {run["key"]: [twin["spec"] for twin in every[row]] for row, run in first.items()}
    return header | kept, taken


def _spans(header: Header) -> list[range]:
    """The rows of each method that moors, in the order of the header's groups."""
    spans, begin = [], 0
    for name, books in groupby(header["books"], key=lambda book: find_method(book["spec"]["method"]).name):
        span = range(begin, begin + len(list(books)))
        begin = span.stop
        if find_method(name).importance is not None:
            spans.append(span)
    return spans


def _write(path: Path, header: Header, tensors: Tensors) -> None:
    told = json.dumps(header | {"digest": _digest(tensors)})
    write_atomically(path, to_bytes(tensors, metadata={"mooring": told}))


def _digest(tensors: Tensors) -> str:
    """Of names and bytes: a bit that flipped on the disk is noticed."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Header, Any]]:
    """The header of a checkpoint, and what its tensors are read from."""
    try:
        with safe_open(path, framework="pt") as opened:
            header = json.loads((opened.metadata() or {})["mooring"])
            if (version := int(header["version"])) != VERSION:
                raise CheckpointVersionError(
                    f"the checkpoint {path} has version {version}, this Mooring reads {VERSION}: "
                    "continue it with the Mooring that wrote it, or delete it"
                )
            yield header, opened
    except (CheckpointError, CheckpointVersionError):
        raise
    except (OSError, SafetensorError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"the checkpoint {path} cannot be read: delete it to start its runs again") from error


def _kinds(fleet: Fleet) -> dict[str, Tensors]:
    """The tensors of a fleet's parts, by what they are."""
    memory = {} if fleet.memory is None else {"kept": fleet.memory.kept}
    stack = fleet.stack
    return {
        "parameter": stack.parameters,
        "buffer": stack.buffers,
        "velocity": fleet.sgd.velocity,
        "first": fleet.first,
        "memory": memory,
    }


def _restore_tensors(fleet: Fleet, tensors: Tensors) -> None:
    found = {kind: {n: t.to(fleet.device) for n, t in _under(tensors, f"{kind}/").items()} for kind in _kinds(fleet)}
    for kind, told in (("parameter", fleet.stack.parameters), ("buffer", fleet.stack.buffers)):
        if {n: t.shape for n, t in found[kind].items()} != {n: t.shape for n, t in told.items()}:
            raise KeyError(kind)
    # in the network's order, not the file's: sums over parameters depend on it in the last bit
    every = [*fleet.stack.parameters, *fleet.stack.buffers]
    fleet.stack.parameters = {name: laid_out(found["parameter"][name]) for name in fleet.stack.parameters}
    fleet.stack.buffers = {name: found["buffer"][name] for name in fleet.stack.buffers}
    fleet.sgd.velocity, fleet.first = (
        {name: laid_out(found[kind][name]) for name in every if name in found[kind]} for kind in ("velocity", "first")
    )
    fleet.curve.sums = tensors["curve"].to(fleet.device)
    fleet.bad = tensors["bad"].to(fleet.device)
    if fleet.memory is not None:
        fleet.memory.kept = found["memory"]["kept"].cpu()


def _told(moorings: Moorings) -> dict[str, Any]:
    counts = {name: held.count for name, held in moorings.held.items()}
    factors = {name: [held.factor.looks, held.factor.tasks] for name, held in moorings.held.items() if held.factor}
    return {"tasks": moorings.tasks, "steps": moorings.steps, "counts": counts, "factors": factors}


def _restore_moorings(moorings: Moorings, told: dict[str, Any], tensors: Tensors, device: torch.device) -> None:
    moorings.tasks, moorings.steps = told["tasks"], told["steps"]
    moorings.mu = tensors["mu"].to(device)
    for name, count in told["counts"].items():
        slots = {slot: laid_out(tensor.to(device)) for slot, tensor in _under(tensors, f"{name}/").items()}
        anchor, previous = slots.pop("anchor"), slots.pop("previous", None)
        moorings.held[name] = Held(anchor, slots, previous, count, _factor(slots, told["factors"].get(name)))


def _factor(slots: Tensors, told: list[int] | None) -> Factor | None:
    """The Kronecker factors among the tensors of a parameter, taken out of them."""
    if told is None:
        return None
    inputs, outputs, past_inputs, past_outputs = (slots.pop(slot) for slot in FACTORS)
    looks, tasks = told
    factor = Factor(inputs, outputs, past_inputs, past_outputs, looks, tasks)
    factor.turn()
    return factor


def _under(tensors: Tensors, prefix: str) -> Tensors:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
