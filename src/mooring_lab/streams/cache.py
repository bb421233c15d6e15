"""A cache of decoded images in the user's cache: built once, keyed by content, and memory-mapped."""

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

Arrays = dict[str, np.ndarray[tuple[int, ...], np.dtype[Any]]]
INDEX = "index.json"
VERSION = 2


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


def load_or_build(key: str, build: Callable[[], Arrays]) -> Arrays:
    """Return the arrays stored under `key`, memory-mapped; build them first if they are missing or damaged.

    Several processes may build the same arrays at once. Each writes to its own folder, and all use that of the first to
    finish.
    """
    home = _writable_folder()
    final = home / key
    if (stored := _open(final)) is not None:
        return stored
    scratch = home / f"{key}.{os.getpid()}.{uuid.uuid4().hex[:8]}"
    damaged = scratch.with_suffix(".damaged")
    try:
        _write(scratch, build())
        if _open(final) is None:  # another process may have been faster
            if final.exists():
                os.replace(final, damaged)
            os.rename(scratch, final)
    except OSError as error:
        if _open(final) is None:
            raise MooringError(
                f"cannot keep decoded images in {home} ({error.strerror}): make room or set XDG_CACHE_HOME"
            ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        shutil.rmtree(damaged, ignore_errors=True)
    if (rebuilt := _open(final)) is None:
        raise MooringError(f"{final} was damaged while it was written: check the disk")
    return rebuilt


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
    """Return the arrays of a folder; None if any file is missing or damaged."""
    try:
        index = json.loads((folder / INDEX).read_text())
        if index["version"] != VERSION:
            return None
        for name, entry in index["arrays"].items():
            path = folder / f"{name}.npy"
            if path.stat().st_size != entry["bytes"] or content_key([path]) != entry["digest"]:
                return None
        # copy on write: a reader may modify its arrays without an error and without changing the file
        return {name: np.load(folder / f"{name}.npy", mmap_mode="c") for name in index["arrays"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None
