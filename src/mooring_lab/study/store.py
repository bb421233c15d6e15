"""The store of a study, one SQLite file with one row for each run, and the lock that one process at a time holds."""

import fcntl
import hashlib
import json
import math
import os
import sqlite3
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from mooring.errors import MooringError
from mooring_lab.model.atomic_files import check_writable
from mooring_lab.model.results import Result
from mooring_lab.model.spec import RunSpec

VERSION = 2
"""The version of the file's layout. Files of any other version are refused."""

REPLACE = "give another file or restore it from a copy"
"""What to do about a damaged file."""

POLL_SECONDS = 0.2
"""How often a process that waits for the lock tries again."""

SCHEMA = """
CREATE TABLE about (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE runs (
    key TEXT PRIMARY KEY,
    stream TEXT NOT NULL,
    method TEXT NOT NULL,
    seed INTEGER NOT NULL,
    status TEXT NOT NULL,
    accuracy REAL,
    forgetting REAL,
    learned REAL,
    finished TEXT NOT NULL,
    spec TEXT NOT NULL,
    result TEXT NOT NULL,
    digest TEXT
);
CREATE TABLE commands (number INTEGER PRIMARY KEY, at TEXT NOT NULL, command TEXT NOT NULL);
"""


def checkpoint_folder(study: Path) -> Path:
    """Return the folder next to a study that holds the checkpoints of its unfinished fleets.

    Example:
        >>> checkpoint_folder(Path("mine.sqlite"))
        PosixPath('mine.sqlite.fleets')
    """
    return study.with_name(f"{study.name}.fleets")


@contextmanager
def lock_study(path: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold the lock of a study, which is released when the process ends, however it ends.

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
        os.close(handle)  # releases the lock; the file stays, so that no process locks a file that is already deleted


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


class Store:
    """The file of a study. The first write creates it, and every write is atomic, even if the process is killed.

    The columns are for people with a SQLite shell; `spec` and `result` hold everything, as JSON.

    Args:
        path: the file.

    Example:
        >>> import tempfile
        >>> result = Result(RunSpec("digits", "0", "plain", 0), "finished", "", [10.0], [[90.0]])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     store = Store(Path(folder) / "study.sqlite")
        ...     store.add([result])
        ...     store.get([result.spec]) == {result.spec.key: result}
        True
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        if self.path.is_dir():
            raise MooringError(
                f"{self.path} is a folder: give a file for the study, such as {self.path / 'study.sqlite'}"
            )
        if self.path.exists():
            if not self.path.is_file():
                raise MooringError(f"{self.path} is not a file: give another for the study")
            with self._connect() as connection:
                self._has_tables(connection)

    def check_writable(self) -> None:
        """Refuse a place that cannot be written to, before any work."""
        check_writable(self.path.parent, create=False)
        if self.path.exists():
            with self._connect() as connection:
                connection.execute("BEGIN IMMEDIATE")
                connection.execute("PRAGMA user_version = 0")  # BEGIN alone accepts a read-only file
                connection.rollback()

    def add(self, results: Iterable[Result]) -> None:
        """Store results, all or none; a result that is there already is replaced."""
        with self._transaction() as connection:
            connection.executemany("REPLACE INTO runs VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", map(_row, results))

    def get(self, specs: Iterable[RunSpec]) -> dict[str, Result]:
        """Return the results of those runs that have one, by key."""
        return {result.spec.key: result for result in self.results({spec.key for spec in specs})}

    def results(self, only: Collection[str] | None = None) -> Iterator[Result]:
        """Yield every result in the order in which they were stored.

        Args:
            only: the keys of the runs to read; None reads all.
        """
        for key, text, digest in self._select("SELECT key, result, digest FROM runs ORDER BY rowid"):
            if only is None or key in only:
                yield self._parse(key, text, digest)

    def log(self, command: str) -> None:
        """Record a command that worked on this study."""
        with self._transaction() as connection:
            connection.execute("INSERT INTO commands (at, command) VALUES (?, ?)", (_now(), command))

    def commands(self) -> list[str]:
        """Return every recorded command, oldest first."""
        return [command for (command,) in self._select("SELECT command FROM commands ORDER BY number")]

    def _select(self, query: str) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of a query; none if the file is missing or empty."""
        if self.path.exists():
            with self._connect() as connection:
                if self._has_tables(connection):
                    yield from connection.execute(query)

    def _parse(self, key: str, text: str, digest: str) -> Result:
        """Return the result in a row; its checksum is compared, because SQLite does not notice a flipped bit."""
        try:
            if digest == _digest(text):
                return Result.from_json(json.loads(text))
        except MooringError:
            raise  # it was written by a newer version
        except (ValueError, TypeError, KeyError, AttributeError):
            pass  # it is not what was written, as if the checksum differed
        raise MooringError(f"the study {self.path} is damaged in run {key}: {REPLACE}")

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Open a transaction that is committed at the end; create the file if it is missing."""
        if not self.path.exists():
            check_writable(self.path.parent)
        with self._connect() as connection:
            connection.execute("BEGIN IMMEDIATE")
            if not self._has_tables(connection):
                for statement in SCHEMA.split(";"):
                    connection.execute(statement)
                connection.execute("INSERT INTO about VALUES ('version', ?), ('made', ?)", (str(VERSION), _now()))
            yield connection
            connection.commit()

    @contextmanager
    def _connect(self) -> Iterator[sqlite3.Connection]:
        """Open a connection; turn SQLite's errors into one line that says what to do."""
        connection = None
        try:
            connection = sqlite3.connect(self.path, timeout=60, isolation_level=None)
            yield connection
        except (sqlite3.Error, UnicodeDecodeError) as error:  # the names of tables may be damaged text
            raise MooringError(f"the study {self.path} {_explain(error)}") from error
        finally:
            if connection is not None:
                connection.close()

    def _has_tables(self, connection: sqlite3.Connection) -> bool:
        """Return False for an empty file; refuse other databases and other versions of the layout."""
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if not tables:
            return False
        query = "SELECT value FROM about WHERE name = 'version'"
        row = connection.execute(query).fetchone() if "about" in tables else None
        if row is None or not str(row[0]).isdecimal():
            raise MooringError(f"{self.path} is a database, but not a study: give another file")
        if int(row[0]) != VERSION:
            raise MooringError(
                f"{self.path} has layout {row[0]}, this Mooring reads {VERSION}: "
                "use the Mooring that wrote it, or give another file"
            )
        return True


def _row(result: Result) -> tuple[object, ...]:
    spec, metrics = result.spec, result.metrics
    values = (metrics[name] for name in ("accuracy", "forgetting", "learned"))
    shown = [None if math.isnan(value) else value for value in values]
    columns = (spec.key, spec.stream, spec.method, spec.seed, result.status, *shown, _now())
    text = json.dumps(result.to_json())
    return (*columns, json.dumps(spec.to_json()), text, _digest(text))


def _digest(text: str) -> str:
    """Return a checksum of a row's text."""
    return hashlib.blake2b(text.encode(errors="replace"), digest_size=8).hexdigest()


def _explain(error: Exception) -> str:
    """Return what is wrong and what to do about it."""
    message = "malformed" if isinstance(error, UnicodeDecodeError) else str(error)
    if "full" in message:
        return "cannot grow: the disk is full; make room and run the same command again, which continues"
    if "readonly" in message or "unable to open" in message:
        return "cannot be written: choose another place with --study"
    if "not a database" in message or "malformed" in message:
        return f"is not a SQLite file, or damaged: {REPLACE}"
    if "locked" in message:
        return "is locked by another program: close it and try again"
    return f"cannot be used: {message}"


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
