"""Recovery of a damaged study: everything that can still be read, in a new file in its place."""

import os
import sqlite3
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mooring.errors import MooringError
from mooring_lab.model.results import Result
from mooring_lab.study.store import Store, lock_study, parse_result

MIN_ROW_BYTES = 64
"""A lower bound of the size of a row, to bound how many rows a file may have."""

MAX_ROWS = 10**9


@dataclass(frozen=True)
class Salvaged:
    """The outcome of a recovery.

    Attributes:
        kept: how many runs were read.
        lost: the runs that could not be read, by key, or by row if the key is unreadable too.
        aside: where the damaged file is now; None if nothing was wrong.
    """

    kept: int
    lost: list[str]
    aside: Path | None


@dataclass(frozen=True)
class _Contents:
    """What can be read of a study, and whether that is all of it."""

    results: list[Result]
    commands: list[str]
    lost: list[str]
    intact: bool


def salvage(path: Path) -> Salvaged:
    """Write every readable run into a new file, put that in place of the damaged one, and keep the damaged one aside.

    Args:
        path: the study.

    Example:
        >>> import tempfile
        >>> from mooring_lab.model.spec import RunSpec
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "study.sqlite"
        ...     Store(path).add([Result(RunSpec("digits", "0", "plain", 0), "finished", "", [10.0], [[90.0]])])
        ...     salvage(path)
        Salvaged(kept=1, lost=[], aside=None)
    """
    if not path.is_file():
        raise MooringError(f"there is no study {path}: give the file to salvage")
    _read(path)  # before a lock file is created next to a file that is no study
    with lock_study(path):
        contents = _read(path)
        if contents.intact:
            return Salvaged(len(contents.results), [], None)
        new = path.with_name(f"{path.name}.salvaged")
        new.unlink(missing_ok=True)
        store = Store(new)
        store.add(contents.results)
        for command in contents.commands:
            store.log(command)
        names = (path.with_name(f"{path.name}.damaged{number or ''}") for number in range(1000))
        aside = next(name for name in names if not name.exists())
        try:
            os.link(path, aside)
            os.replace(new, path)
        except OSError as error:
            raise MooringError(f"cannot put {path} aside ({error.strerror}): what was read is in {new}") from error
        with suppress(OSError):
            os.replace(f"{path}-journal", f"{aside}-journal")  # it belongs to the damaged file
    return Salvaged(len(contents.results), contents.lost, aside)


def _read(path: Path) -> _Contents:
    """Read the rows one by one; refuse a damaged file of which nothing can be read."""
    results: dict[str, Result] = {}
    commands: list[str] = []
    lost: list[str] = []
    connection = sqlite3.connect(path, timeout=60)
    try:
        for number in range(1, _last_row(connection, path) + 1):
            key = f"row {number}"
            try:
                query = "SELECT key, result, digest FROM runs WHERE rowid = ?"
                if row := connection.execute(query, (number,)).fetchone():
                    key = str(row[0])
                    results[key] = parse_result(row[1], row[2])
            except MooringError:
                raise  # the text is as it was written, but by a newer version
            except (sqlite3.Error, ValueError, TypeError, KeyError, AttributeError):
                lost.append(key)
        intact = False
        with suppress(sqlite3.Error, UnicodeDecodeError):
            intact = list(connection.execute("PRAGMA integrity_check(1)")) == [("ok",)] and not lost
        with suppress(sqlite3.Error, UnicodeDecodeError):
            commands = [str(text) for (text,) in connection.execute("SELECT command FROM commands ORDER BY number")]
    finally:
        connection.close()
    if not results and not intact:
        raise MooringError(f"nothing in {path} can be read: restore it from a copy, or give another file")
    return _Contents(list(results.values()), commands, [key for key in lost if key not in results], intact)


def _last_row(connection: sqlite3.Connection, path: Path) -> int:
    """Return the number of the last row, or an upper bound if that cannot be read."""
    try:
        (last,) = connection.execute("SELECT max(rowid) FROM runs").fetchone()
    except (sqlite3.Error, UnicodeDecodeError):
        return path.stat().st_size // MIN_ROW_BYTES
    return min(int(last or 0), MAX_ROWS)
