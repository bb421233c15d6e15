"""Files that are whole or not there at all."""

import os
import uuid
from pathlib import Path

from mooring.errors import MooringError

__all__ = ["check_writable", "write_atomically"]


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that a reader, or a crash at any moment, meets the old content or the new, never a part.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_atomically(Path(folder) / "told.txt", b"all of it")
        ...     (Path(folder) / "told.txt").read_bytes()
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
    """Refuse a folder that cannot be written to; make it where it is missing, or try the nearest that is there.

    Args:
        folder: the folder.
        create: whether to make it where it is missing.
    """
    try:
        if create:
            folder.mkdir(parents=True, exist_ok=True)
        else:
            folder = next(each for each in (folder, *folder.absolute().parents) if each.exists())
        probe = folder / f".mooring-{uuid.uuid4().hex[:8]}"
        probe.touch(exist_ok=False)
        probe.unlink()
    except OSError as error:
        raise MooringError(f"cannot write in {folder} ({error.strerror}): choose another place") from error


def _sync_folder(folder: Path) -> None:
    """Make a rename last through a power cut, where the system lets us."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
