"""What can still be read of a damaged study, in a new file in its place."""

import os
import sqlite3
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mooring.errors import MooringError
from mooring.lab.model.results import Result
from mooring.lab.study.lock import locked
from mooring.lab.study.store import Store, read_result

__all__ = ["Salvaged", "salvage"]

LEAST = 64
"""Bytes that a row takes at the least, for a bound on how many there may be."""


@dataclass(frozen=True)
class Salvaged:
    """What came of it.

    Attributes:
        kept: how many runs were read.
        lost: which were not, by key, or by row where that could not be read either.
        aside: where the damaged file is now; None where nothing was wrong.
    """

    kept: int
    lost: list[str]
    aside: Path | None


def salvage(path: Path) -> Salvaged:
    """Put every run that can be read into a new file, and that in the place of the damaged one, which is kept aside.

    Args:
        path: the study.

    Example:
        >>> import tempfile
        >>> from mooring.lab.model.spec import RunSpec
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "study.sqlite"
        ...     Store(path).add([Result(RunSpec("digits", "0", "plain", 0), "finished", "", [10.0], [[90.0]])])
        ...     salvage(path)
        Salvaged(kept=1, lost=[], aside=None)
    """
    if not path.is_file():
        raise MooringError(f"there is no study {path}: give the file to salvage")
    _something(path)  # before a lock is left beside a file that is no study
    with locked(path):
        results, commands, lost, fine = _something(path)
        if fine:
            return Salvaged(len(results), [], None)
        made = path.with_name(f"{path.name}.salvaged")
        made.unlink(missing_ok=True)
        store = Store(made)
        store.add(results)
        for command in commands:
            store.log(command)
        aside = next(each for each in _names(path) if not each.exists())
        try:
            os.link(path, aside)
            os.replace(made, path)
        except OSError as error:
            raise MooringError(f"cannot put {path} aside ({error.strerror}): what was read is in {made}") from error
        with suppress(OSError):
            os.replace(f"{path}-journal", f"{aside}-journal")  # it belongs to the damaged file
    return Salvaged(len(results), lost, aside)


def _names(path: Path) -> list[Path]:
    return [path.with_name(f"{path.name}.damaged{number or ''}") for number in range(1000)]


def _something(path: Path) -> tuple[list[Result], list[str], list[str], bool]:
    """What `_read` finds; refused where that is nothing."""
    found = _read(path)
    if not found[0] and not found[3]:
        raise MooringError(f"nothing in {path} can be read: restore it from a copy, or give another file")
    return found


def _read(path: Path) -> tuple[list[Result], list[str], list[str], bool]:
    """Results, commands, what was lost, and whether nothing was wrong."""
    results: dict[str, Result] = {}
    commands: list[str] = []
    lost: list[str] = []
    connection = sqlite3.connect(path, timeout=60)
    try:
        digest = _digests(connection)
        for row in range(1, _last(connection, path) + 1):
            key, found = f"row {row}", None
            try:
                found = connection.execute(f"SELECT key, result, {digest} FROM runs WHERE rowid = ?", (row,)).fetchone()
                if found is not None:
                    key = str(found[0])
                    results[key] = read_result(found[1], found[2])
            except (sqlite3.Error, ValueError, TypeError, KeyError) as error:
                if isinstance(error, MooringError) and found is not None and found[2] is not None:
                    raise  # it is as it was written, by a newer version
                lost.append(key)
        sound = _sound(connection)
        with suppress(sqlite3.Error, UnicodeDecodeError):
            commands = [str(each) for (each,) in connection.execute("SELECT command FROM commands ORDER BY number")]
    finally:
        connection.close()
    return list(results.values()), commands, [key for key in lost if key not in results], sound and not lost


def _digests(connection: sqlite3.Connection) -> str:
    """The column of digests, where there is one."""
    try:
        connection.execute("SELECT digest FROM runs LIMIT 0")
    except sqlite3.OperationalError:
        return "NULL"
    except (sqlite3.Error, UnicodeDecodeError):
        pass
    return "digest"


def _last(connection: sqlite3.Connection, path: Path) -> int:
    """The last row, or one that is surely behind it."""
    most = path.stat().st_size // LEAST
    try:
        found = connection.execute("SELECT max(rowid) FROM runs").fetchone()[0]
    except (sqlite3.Error, UnicodeDecodeError):
        return most
    return min(int(found or 0), 10**9)


def _sound(connection: sqlite3.Connection) -> bool:
    try:
        return [told for (told,) in connection.execute("PRAGMA integrity_check(1)")] == ["ok"]
    except (sqlite3.Error, UnicodeDecodeError):
        return False
