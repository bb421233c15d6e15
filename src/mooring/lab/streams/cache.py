"""Decoded pixels next to the data: built once, keyed by content, memory-mapped ever after."""

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from mooring.errors import MooringError

__all__ = ["Arrays", "content_key", "load_or_build"]

Arrays = dict[str, np.ndarray[tuple[int, ...], np.dtype[Any]]]
FOLDER = ".mooring"
INDEX = "index.json"
VERSION = 1


def content_key(files: Iterable[Path], *options: object) -> str:
    """A name for what these files hold and how they are to be decoded: another byte, another name.

    Args:
        files: the files, in an order that matters.
        options: whatever else decides the result.
    """
    digest = hashlib.blake2b(repr((VERSION, options)).encode(), digest_size=16)
    for path in files:
        digest.update(path.name.encode() + b"\0" + path.stat().st_size.to_bytes(8, "big"))
        with path.open("rb") as opened:
            while part := opened.read(1 << 20):
                digest.update(part)
    return digest.hexdigest()


def load_or_build(data: Path, key: str, build: Callable[[], Arrays]) -> Arrays:
    """The arrays kept under `key`, memory-mapped; built first where they are missing or damaged.

    They lie in `.mooring` inside the data folder, or in the user's cache where that cannot be written. Several
    processes may build the same at once: each works in a folder of its own, the first to finish wins, the others take
    what it made.
    """
    home = _writable(data)
    final = home / key
    found = _open(final)
    if found is not None:
        return found
    scratch = home / f"{key}.{os.getpid()}.{uuid.uuid4().hex[:8]}"
    try:
        _write(scratch, build())
        if final.exists():  # damaged, or made by another process just now
            found = _open(final)
            if found is not None:
                return found
            os.replace(final, scratch.with_suffix(".damaged"))
        os.rename(scratch, final)
    except OSError as error:
        found = _open(final)
        if found is None:
            raise MooringError(
                f"cannot keep decoded images in {home} ({error.strerror}): make room or set XDG_CACHE_HOME"
            ) from error
        return found
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        shutil.rmtree(scratch.with_suffix(".damaged"), ignore_errors=True)
    found = _open(final)
    if found is None:
        raise MooringError(f"{final} was damaged while it was written: check the disk")
    return found


def _writable(data: Path) -> Path:
    """Where to keep it: beside the data, or in the user's cache."""
    users = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mooring"
    for home in (data / FOLDER, users):
        try:
            home.mkdir(parents=True, exist_ok=True)
            if os.access(home, os.W_OK):
                return home
        except OSError:
            continue
    raise MooringError(f"neither {data / FOLDER} nor {users} can be written: set XDG_CACHE_HOME to a folder that can")


def _write(folder: Path, arrays: Arrays) -> None:
    folder.mkdir()
    index = {}
    for name, array in arrays.items():
        path = folder / f"{name}.npy"
        with path.open("wb") as opened:
            np.save(opened, array)
            opened.flush()
            os.fsync(opened.fileno())
        index[name] = {"bytes": path.stat().st_size, "digest": content_key([path])}
    (folder / INDEX).write_text(json.dumps({"version": VERSION, "arrays": index}))


def _open(folder: Path) -> Arrays | None:
    """The arrays of a finished folder, or None where anything is missing or not as it was written."""
    try:
        index = json.loads((folder / INDEX).read_text())
        if index["version"] != VERSION:
            return None
        for name, kept in index["arrays"].items():
            path = folder / f"{name}.npy"
            if path.stat().st_size != kept["bytes"] or content_key([path]) != kept["digest"]:
                return None
        # copy on write: a reader can neither spoil the file nor be told off for trying
        return {name: np.load(folder / f"{name}.npy", mmap_mode="c") for name in index["arrays"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None
