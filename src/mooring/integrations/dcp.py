"""Loading from torch.distributed.checkpoint, with any number of ranks."""

import os
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_into
from torch.distributed.checkpoint.storage import StorageReader

from mooring.distributed.dtensor import local_tensor, to_dtensor
from mooring.errors import MooringError
from mooring.hold.finish import PREFIX
from mooring.mooring import Mooring


def load(
    moor: Mooring,
    checkpoint_id: str | os.PathLike[str] | None = None,
    *,
    key: str = "mooring",
    storage_reader: StorageReader | None = None,
) -> None:
    """Load a state that `torch.distributed.checkpoint.save` wrote; every rank must call this.

    `dcp.load` fills existing tensors. Which tensors a state has depends on what was trained before the checkpoint, so
    they are created here from the checkpoint's metadata, sharded like the model's parameters. Load the model and its
    optimizer first and attach then, because torch may take a step to create an optimizer's state.

    Args:
        moor: a Mooring of the model and optimizer to train.
        checkpoint_id: the folder of the checkpoint.
        key: the key that `moor.state_dict()` was saved under.
        storage_reader: a reader, instead of a folder.

    Example:
        >>> import mooring
        >>> model = torch.nn.Linear(2, 1)
        >>> moor = mooring.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> load(moor, "checkpoint")  # doctest: +SKIP
    """
    if storage_reader is None:
        if checkpoint_id is None:
            raise MooringError("give checkpoint_id, the folder of the checkpoint, or a storage_reader")
        storage_reader = FileSystemReader(checkpoint_id)
    entries = storage_reader.read_metadata().state_dict_metadata
    inside = {name.removeprefix(f"{key}."): entry for name, entry in entries.items() if name.startswith(f"{key}.")}
    if not inside:
        keys = ", ".join(sorted({repr(name.partition(".")[0]) for name in entries}))
        raise MooringError(f"the checkpoint has nothing under key={key!r}; it has {keys}")
    moor._states.refresh()
    like = {name: p for p, name in moor._states.names.items()}
    averaged = {PREFIX + name: p for name, p in moor._states.trained_by_name().items()}
    shaped = {name: averaged.get(name, like.get(name.partition(".")[2])) for name in inside}
    state = {name: _allocate(entry, shaped[name]) for name, entry in inside.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # a single process is allowed
        load_into({key: state}, checkpoint_id=checkpoint_id, storage_reader=storage_reader)
    moor.load_state_dict(state)


def _allocate(entry: Any, p: Tensor | None) -> Tensor:
    """Return an empty tensor for an entry, sharded like the parameter that it belongs to."""
    if not isinstance(entry, TensorStorageMetadata):
        raise MooringError("this is not the state of a Mooring: it has entries that are not tensors")
    dtype = entry.properties.dtype
    if p is None or entry.size != p.shape:
        return torch.empty(entry.size, dtype=dtype)
    return to_dtensor(torch.empty_like(local_tensor(p).detach(), dtype=dtype), p)
