"""The state of a Mooring in a safetensors file, with a fingerprint of the weights it belongs to."""

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from mooring.distributed.dtensor import gathered, local_tensor, rank, reduce_over_shards, reshard, sharded
from mooring.errors import MooringError
from mooring.mooring import Mooring
from mooring.rules import State

NAME = "mooring.safetensors"
"""The name of the file in a checkpoint folder."""


def state_path(path: str | Path) -> Path:
    """Return the path of the file, for a file or a folder."""
    return Path(path) if str(path).endswith(".safetensors") else Path(path) / NAME


def save(moor: Mooring, path: str | Path, *, writes: bool | None = None) -> Path:
    """Write the state and the fingerprint of the model's weights atomically, to a file or into a folder.

    Of a sharded model the file is that of one process: every rank must call this, and shards are gathered one tensor
    at a time.

    Args:
        moor: the Mooring.
        path: the file or folder.
        writes: whether this process writes the file; by default each does, but of a sharded model the first rank.
    """
    from safetensors.torch import save_file

    file = state_path(path)
    writes = not is_sharded(moor) or rank() == 0 if writes is None else writes
    state = _gather(moor.state_dict(), keep=writes)
    weights = fingerprint(moor.model)
    if writes:
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_name(f"{file.name}.tmp")
        save_file(state, unfinished, metadata={"weights": json.dumps(weights)})
        os.replace(unfinished, file)
    return file


def is_sharded(moor: Mooring) -> bool:
    """Return whether parameters are sharded, so that the state is gathered from all ranks."""
    return any(sharded(p) for group in moor.optimizer.param_groups for p in group["params"])


def _gather(state: State, *, keep: bool) -> State:
    """Return a state with whole tensors; nothing if it is not kept. What was gathered is moved to the CPU."""
    whole: State = {}
    for key, tensor in state.items():
        full = gathered(tensor.detach())
        if keep:
            whole[key] = (full.cpu() if sharded(tensor) else full).contiguous()
    return whole


def load(path: str | Path) -> State:
    """Read a state from a file or folder, without a check of the weights."""
    file = state_path(path)
    if not file.is_file():
        raise MooringError(f"{file} does not exist: give the file or folder that the state of a Mooring was saved to")
    return read(file)[0]


def load_for(model: nn.Module, files: Sequence[Path]) -> tuple[State, Path]:
    """Read the first of these files that belongs to the model's present weights.

    The state of other weights would pull the model to the wrong anchors without an error.
    """
    existing = [file for file in files if file.is_file()]
    present = fingerprint(model)
    for file in existing:
        state, weights = read(file)
        if belongs(weights, present):
            return state, file
    if existing:
        raise MooringError(
            f"the state in {existing[0]} belongs to other weights: resume from a checkpoint that has both"
        )
    raise MooringError(f"{files[0]} does not exist: resume from a checkpoint that was saved with a MooringCallback")


def read(file: Path) -> tuple[State, dict[str, float]]:
    """Return the state in a file, and the fingerprint of the weights."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            weights = json.loads((opened.metadata() or {}).get("weights", "{}"))
            return {key: opened.get_tensor(key) for key in opened.keys()}, weights  # noqa: SIM118
    except (SafetensorError, ValueError) as error:
        raise MooringError(f"{file} is not the state of a Mooring: {error}") from error


@torch.no_grad()
def fingerprint(model: nn.Module) -> dict[str, float]:
    """Return the sum of each trainable parameter, which differs between training steps; of shards, on every rank.

    Example:
        >>> layer = nn.Linear(2, 1, bias=False)
        >>> _ = nn.init.constant_(layer.weight, 0.5)
        >>> fingerprint(layer)
        {'weight': 1.0}
    """
    reshard(model.modules())  # an evaluation leaves parameters gathered, maybe in a narrower dtype
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    sums = reduce_over_shards([_sum(p) for p in trained.values()], list(trained.values()))
    return {name: total.item() for name, total in zip(trained, sums, strict=True)}


def _sum(p: Tensor) -> Tensor:
    """Return the sum of a parameter on the CPU; of a shard, on its device, where shards are added up."""
    return local_tensor(p).sum(dtype=torch.float64) if sharded(p) else p.cpu().sum(dtype=torch.float64)


def belongs(weights: dict[str, float], model: dict[str, float]) -> bool:
    """Return whether two fingerprints are of the same weights; another machine may sum in another order.

    Example:
        >>> belongs({"weight": 1.0}, {"weight": 1.0 + 1e-15}), belongs({"weight": 1.0}, {"weight": 1.001})
        (True, False)
    """
    close = (math.isclose(weights[name], model[name], rel_tol=1e-9, abs_tol=1e-9) for name in weights.keys() & model)
    return weights.keys() == model.keys() and all(close)
