"""The results of a study: one SQLite file, one row for each run, found by the run's content address."""

import hashlib
import json
import sqlite3
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path

from mooring.errors import MooringError
from mooring.lab.model.atomic_files import check_writable
from mooring.lab.model.results import Result
from mooring.lab.model.spec import RunSpec

__all__ = ["Store", "fleets_of", "read_result"]

VERSION = 2
"""Of the file's layout. Older files are read, and brought up to it by the first write; newer ones are refused."""

TABLES = """
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


def fleets_of(study: Path) -> Path:
    """The folder beside a study in which its unfinished fleets are saved.

    Example:
        >>> fleets_of(Path("mine.sqlite"))
        PosixPath('mine.sqlite.fleets')
    """
    return study.with_name(f"{study.name}.fleets")


class Store:
    """A study's file. It is made with the first write; a write is there whole or not at all, even after a kill.

    Columns are for people with a SQLite shell; `spec` and `result` hold everything, as JSON.

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
            with self._open() as connection:
                self._check_version(connection)

    def check_writable(self) -> None:
        """Refuse a place that cannot be written to, before any work."""
        check_writable(self.path.parent, create=False)
        if self.path.exists():
            with self._open() as connection:
                connection.execute("BEGIN IMMEDIATE")
                connection.execute("PRAGMA user_version = 0")  # BEGIN alone does not mind a file that is read-only
                connection.rollback()

    def add(self, results: Iterable[Result]) -> None:
        """Keep results, all of them or none; one that is there already is replaced."""
        with self._written() as connection:
            connection.executemany("REPLACE INTO runs VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", map(_row, results))

    def get(self, specs: Iterable[RunSpec]) -> dict[str, Result]:
        """Those of the runs that have a result, by key."""
        wanted = {spec.key for spec in specs}
        return {result.spec.key: result for result in self.results(wanted)}

    def results(self, only: Collection[str] | None = None) -> Iterator[Result]:
        """Every result, in the order they were finished; or those with these keys, and nothing else is read."""
        if not self.path.exists():
            return
        with self._open() as connection:
            version = self._check_version(connection)
            if not version:
                return
            columns = f"key, result, {'digest' if version > 1 else 'NULL'}"
            for key, told, digest in connection.execute(f"SELECT {columns} FROM runs ORDER BY rowid"):
                if only is None or key in only:
                    yield self._read(key, told, digest)

    def log(self, command: str) -> None:
        """Write down a command that worked on this study."""
        with self._written() as connection:
            connection.execute("INSERT INTO commands (at, command) VALUES (?, ?)", (_now(), command))

    def commands(self) -> list[str]:
        """Every command written down, oldest first."""
        if not self.path.exists():
            return []
        with self._open() as connection:
            if not self._check_version(connection):
                return []
            return [command for (command,) in connection.execute("SELECT command FROM commands ORDER BY number")]

    def _read(self, key: str, told: str, digest: str | None) -> Result:
        try:
            return read_result(told, digest)
        except MooringError:
            raise
        except (ValueError, TypeError, KeyError) as error:
            raise MooringError(
                f"the study {self.path} is damaged in run {key}: `mooring salvage {self.path}` keeps the rest"
            ) from error

    @contextmanager
    def _written(self) -> Iterator[sqlite3.Connection]:
        """A transaction, on a file that is made first where it is missing."""
        if not self.path.exists():
            check_writable(self.path.parent)
        with self._open() as connection:
            connection.execute("BEGIN IMMEDIATE")
            version = self._check_version(connection)
            if not version:
                for statement in TABLES.split(";"):
                    connection.execute(statement)
                about = [("version", str(VERSION)), ("made", _now())]
                connection.executemany("INSERT INTO about VALUES (?, ?)", about)
            elif version < 2:
                connection.execute("ALTER TABLE runs ADD COLUMN digest TEXT")
                connection.execute("UPDATE about SET value = ? WHERE name = 'version'", (str(VERSION),))
            yield connection
            connection.commit()

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """A connection whose troubles are told in one line."""
        connection = None
        try:
            connection = sqlite3.connect(self.path, timeout=60, isolation_level=None)
            yield connection
        except (sqlite3.Error, UnicodeDecodeError) as error:  # damaged names of tables are not even text
            raise MooringError(f"the study {self.path} {_trouble(error)}") from error
        finally:
            if connection is not None:
                connection.close()

    def _check_version(self, connection: sqlite3.Connection) -> int:
        """The file's version; 0 for an empty file."""
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if not tables:
            return 0
        found = (
            connection.execute("SELECT value FROM about WHERE name = 'version'").fetchone()
            if "about" in tables
            else None
        )
        if found is None:
            raise MooringError(f"{self.path} is a database, but not a study: give another file")
        if not str(found[0]).isdecimal():
            raise MooringError(f"{self.path} is a database, but not a study: give another file")
        if int(found[0]) > VERSION:
            raise MooringError(
                f"{self.path} was made by a newer version of Mooring (its layout is {found[0]}, this one knows "
                f"{VERSION}): upgrade, or give another file"
            )
        return int(found[0])


def read_result(told: str, digest: str | None) -> Result:
    """The result in a row.

    Raises:
        ValueError: where it is not what was written.

    Example:
        >>> read_result("{}", "0")
        Traceback (most recent call last):
        ...
        ValueError: another digest
    """
    if digest is not None and digest != _digest(told):
        raise ValueError("another digest")
    return Result.from_json(json.loads(told))


def _row(result: Result) -> tuple[object, ...]:
    spec, told = result.spec, result.metrics
    shown = [None if told[name] != told[name] else told[name] for name in ("accuracy", "forgetting", "learned")]
    columns = (spec.key, spec.stream, spec.method, spec.seed, result.status, *shown, _now())
    written = json.dumps(result.to_json())
    return (*columns, json.dumps(spec.to_json()), written, _digest(written))


def _digest(told: str) -> str:
    """SQLite does not notice a bit that flipped on the disk."""
    return hashlib.blake2b(told.encode(errors="replace"), digest_size=8).hexdigest()


def _trouble(error: Exception) -> str:
    """What SQLite says, and what to do about it."""
    told = "malformed" if isinstance(error, UnicodeDecodeError) else str(error)
    if "full" in told:
        return "cannot grow: the disk is full; make room and run the same command again, which continues"
    if "readonly" in told or "unable to open" in told:
        return "cannot be written: choose another place with --study"
    if "not a database" in told or "malformed" in told:
        return "is not a SQLite file, or damaged: give another file, or try `mooring salvage` on it"
    if "locked" in told:
        return "is locked by another program: close it and try again"
    return f"cannot be used: {told}"


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
