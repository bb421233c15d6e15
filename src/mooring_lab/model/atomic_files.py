"""Atomic file writes: a file has its old content or its new content, never a part of it."""

import os
import uuid
from pathlib import Path

from mooring.errors import MooringError


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file's content in one step; a reader or a crash at any moment sees the old content or the new.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_atomically(Path(folder) / "notes.txt", b"all of it")
        ...     (Path(folder) / "notes.txt").read_bytes()
        b'all of it'
    """
    scratch = path.with_name(f".{path.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}")
    try:
        with scratch.open("wb") as opened:
            opened.write(data)
            opened.flush()
            os.fsync(opened.fileno())
        os.replace(scratch, path)
        _sync_folder(path.parent)
    except OSError as error:
        raise MooringError(f"cannot write {path} ({error.strerror}): make room, or choose another place") from error
    finally:
        scratch.unlink(missing_ok=True)


def check_writable(folder: Path, *, create: bool = True) -> None:
    """Raise an error unless files can be created in a folder.

    A missing folder is created; with create=False, its closest existing parent is checked instead.
    """
    try:
        if create:
            folder.mkdir(parents=True, exist_ok=True)
        else:
            folder = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        probe = folder / f".mooring-{uuid.uuid4().hex[:8]}"
        probe.touch(exist_ok=False)
        probe.unlink()
    except OSError as error:
        raise MooringError(f"cannot write in {folder} ({error.strerror}): choose another place") from error


def _sync_folder(folder: Path) -> None:
    """Flush the folder entry, so that a rename survives a power failure where the system supports that."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
