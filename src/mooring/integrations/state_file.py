"""A mooring's state in a safetensors file, with a mark that tells which weights it belongs to."""

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from mooring.errors import MooringError
from mooring.importance import State
from mooring.moor import Mooring

__all__ = ["NAME", "load", "load_for", "save"]

NAME = "mooring.safetensors"
"""What the file is called in a folder of a checkpoint."""


def place(path: str | Path) -> Path:
    """The file itself, where a folder may be meant."""
    return Path(path) if str(path).endswith(".safetensors") else Path(path) / NAME


def save(moor: Mooring, path: str | Path) -> Path:
    """Write a mooring's state, and the mark of the model's weights, to a file or into a folder, all or nothing."""
    from safetensors.torch import save_file

    file = place(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f"{file.name}.tmp")
    state = {key: tensor.detach().contiguous() for key, tensor in moor.state_dict().items()}
    save_file(state, unfinished, metadata={"weights": json.dumps(mark(moor.model))})
    os.replace(unfinished, file)
    return file


def load(path: str | Path) -> State:
    """Read a state from a file or folder, whichever weights it belongs to."""
    file = place(path)
    if not file.is_file():
        raise MooringError(f"there is no {file}: give the file or folder that a mooring's state was saved to")
    return read(file)[0]


def load_for(model: nn.Module, places: Sequence[Path]) -> tuple[State, Path]:
    """Read the first of these files that belongs to the weights that the model has now.

    A file that was written at another time would pull the model to the wrong anchors, in silence.
    """
    there = [file for file in places if file.is_file()]
    for file in there:
        state, weights = read(file)
        if belongs(weights, mark(model)):
            return state, file
    if there:
        raise MooringError(f"the state in {there[0]} belongs to other weights than these: resume from where both are")
    raise MooringError(f"there is no {places[0]}: resume from a checkpoint that was written with a MooringCallback")


def read(file: Path) -> tuple[State, dict[str, float]]:
    """What a file holds: the state, and the mark of the weights."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            told = json.loads((opened.metadata() or {}).get("weights", "{}"))
            return {key: opened.get_tensor(key) for key in opened.keys()}, told  # noqa: SIM118
    except (SafetensorError, ValueError) as error:
        raise MooringError(f"{file} is not a mooring's state: {error}") from error


@torch.no_grad()
def mark(model: nn.Module) -> dict[str, float]:
    """What tells one training step's weights from another's: the sum of each trainable parameter.

    Example:
        >>> layer = nn.Linear(2, 1, bias=False)
        >>> _ = nn.init.constant_(layer.weight, 0.5)
        >>> mark(layer)
        {'weight': 1.0}
    """
    trained = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
    return {name: p.cpu().sum(dtype=torch.float64).item() for name, p in trained}


def belongs(weights: dict[str, float], model: dict[str, float]) -> bool:
    """Whether two marks are of the same weights; another machine may add in another order.

    Example:
        >>> belongs({"weight": 1.0}, {"weight": 1.0 + 1e-15}), belongs({"weight": 1.0}, {"weight": 1.001})
        (True, False)
    """
    close = (math.isclose(weights[name], model[name], rel_tol=1e-9, abs_tol=1e-9) for name in weights.keys() & model)
    return weights.keys() == model.keys() and all(close)
