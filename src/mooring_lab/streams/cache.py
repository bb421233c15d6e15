"""A cache of decoded images in the user's cache: built once, keyed by content, and memory-mapped."""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from torch import Tensor

from mooring.errors import MooringError
from mooring_lab.model.atomic_files import write_atomically

Tensors = dict[str, Tensor]
VERSION = 3


def content_key(files: Iterable[Path], *options: object) -> str:
    """Return the hash of the files' names and contents and of the options.

    Args:
        files: the files; their order matters.
        options: everything else that the result depends on.
    """
    digest = hashlib.blake2b(repr((VERSION, options)).encode(), digest_size=16)
    for path in files:
        digest.update(path.name.encode() + b"\0" + path.stat().st_size.to_bytes(8, "big"))
        with path.open("rb") as opened:
            while part := opened.read(1 << 20):
                digest.update(part)
    return digest.hexdigest()


def cache_folder() -> Path:
    """Return the folder of decoded images: mooring/decoded in $XDG_CACHE_HOME or in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mooring" / "decoded"


def cache_size() -> int:
    """Return how many bytes the decoded images take."""
    return sum(path.stat().st_size for path in cache_folder().rglob("*") if path.is_file())


def clear_cache() -> int:
    """Delete all decoded images, which the next study decodes again, and return how many bytes they took."""
    size = cache_size()
    shutil.rmtree(cache_folder(), ignore_errors=True)
    return size


def load_or_build(key: str, build: Callable[[], Tensors]) -> Tensors:
    """Return the tensors stored under `key`, memory-mapped; build them first if they are missing or damaged.

    Several processes may build the same tensors at once; each replaces the file as a whole.
    """
    path = _writable_folder() / f"{key}.safetensors"
    if (stored := _read(path)) is None:
        tensors = build()
        try:
            write_atomically(path, to_bytes(tensors, metadata={"digest": _digest(tensors)}))
        except MooringError as error:
            raise MooringError(f"{error}, such as another XDG_CACHE_HOME") from error
        stored = _read(path)
    if stored is None:
        raise MooringError(f"{path} was damaged while it was written: check the disk")
    return stored


def _writable_folder() -> Path:
    """Return the folder of decoded images; make it first."""
    home = cache_folder()
    try:
        home.mkdir(parents=True, exist_ok=True)
        writable = os.access(home, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        raise MooringError(f"{home}, for decoded images, cannot be written: set XDG_CACHE_HOME to a folder that can")
    return home


def _read(path: Path) -> Tensors | None:
    """Return the tensors of a file, mapped so that changing them does not change the file; None if it is damaged."""
    try:
        with safe_open(path, framework="pt") as opened:
            digest = (opened.metadata() or {}).get("digest")
        tensors = load_file(path)
    except (OSError, SafetensorError):
        return None
    return tensors if digest == _digest(tensors) else None


def _digest(tensors: Tensors) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(tensors.items()):
        digest.update(repr((name, tensor.dtype, tuple(tensor.shape))).encode())
        digest.update(tensor.numpy().data)
    return digest.hexdigest()
