"""The lock of a study: one process at a time, released when the process ends, however it ends."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mooring.errors import MooringError

__all__ = ["lock_study"]

POLL_SECONDS = 0.2


@contextmanager
def lock_study(path: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold the lock of a study.

    Args:
        path: the study's file; the lock is a file next to it.
        wait: wait for another process to finish instead of refusing.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, lock_study(Path(folder) / "study.sqlite"):
        ...     print("alone")
        alone
    """
    lock = path.with_name(f"{path.name}.lock")
    try:
        handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise MooringError(f"cannot write in {path.parent} ({error.strerror}): choose another place") from error
    try:
        while not _try_lock(handle):
            if not wait:
                owner = os.pread(handle, 64, 0).decode(errors="replace").strip() or "unknown"
                raise MooringError(
                    f"the study {path} is being run by process {owner}: let it finish, or say --wait to go on after it"
                )
            time.sleep(POLL_SECONDS)
        try:
            os.truncate(handle, 0)
            os.pwrite(handle, str(os.getpid()).encode(), 0)
        except OSError as error:
            raise MooringError(f"cannot write {lock} ({error.strerror}): make room, or choose another place") from error
        yield
    finally:
        os.close(handle)  # releases the lock; the file stays, so that nobody locks a file that is already deleted


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
