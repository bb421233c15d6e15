"""A study file: a TOML file with the options of `mooring compare` or `mooring tune`."""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from mooring.errors import MooringError, unknown
from mooring_lab.methods import find_method, resolve_methods
from mooring_lab.model.training import Training
from mooring_lab.streams.options import StreamOptions
from mooring_lab.study.defaults import COMPARED_METHODS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

TOP_KEYS = ("study", "report", "baseline", "device", "fleet", "methods", "seeds", "stream", "train", "method", "tune")
TUNE_ARGUMENTS = {"tasks": "tasks", "lrs": "lrs", "strengths": "strengths", "seeds": "search_seeds"}
METHOD_KEYS = ("lr", "strength")


@dataclass(frozen=True)
class StudyFile:
    """The contents of a study file.

    Attributes:
        study: the file of results; by default next to the study file, under its name.
        comparison: the arguments of `mooring_lab.study.comparison.comparison`.
        search: the other arguments of `mooring_lab.study.protocol.tune`; None if nothing is searched.
        report: the folder of the report; None writes none.
        baseline: the method to compare accuracy with.
        device: the device to train on.
        fleet: the most runs to train together.
    """

    study: Path
    comparison: dict[str, Any]
    search: dict[str, Any] | None = None
    report: Path | None = None
    baseline: str | None = None
    device: str = "cpu"
    fleet: int | None = None


def read_study_file(path: Path | str) -> StudyFile:
    """Read a study file; refuse unknown keys and wrong values with their line.

    Paths in it are relative to its folder.

    Args:
        path: the file.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "digits.toml"
        ...     _ = path.write_text("seeds = 2")
        ...     read_study_file(path).comparison["seeds"]
        2
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        tables = tomllib.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise MooringError(
            f"{path} cannot be read ({reason}): give a study as TOML; docs/studies.md shows every key"
        ) from error
    except tomllib.TOMLDecodeError as error:
        raise MooringError(f"{path} is not TOML: {error}") from error
    return _Reader(path, text).read(tables)


class _Reader:
    """The parser of one file, which keeps its lines for error messages."""

    def __init__(self, path: Path, text: str) -> None:
        self.path, self.lines = path, text.splitlines()

    def read(self, tables: dict[str, Any]) -> StudyFile:
        self.check(tables, TOP_KEYS, "", {"study": str, "report": str, "baseline": str, "device": str, "fleet": int})
        streams = tables.get("stream", {"name": "digits"})
        train = self.table(tables, "train")
        self.check(train, [field.name for field in fields(Training) if field.name != "paper"], "train")
        by_method = self.table(tables, "method")
        search = None
        if "tune" in tables:
            tune = self.table(tables, "tune")
            self.check(tune, list(TUNE_ARGUMENTS), "tune")
            search = {TUNE_ARGUMENTS[key]: value for key, value in tune.items()}
            self.check_not_searched(train, by_method)
        methods = self.methods(tables.get("methods", COMPARED_METHODS.split(",")))
        comparison = {
            "stream": [self.stream(table) for table in (streams if isinstance(streams, list) else [streams])],
            "methods": methods,
            "seeds": self.seeds(tables.get("seeds", 5)),
            **{key: value for key, value in train.items() if key not in ("lr", "init")},
            **({"init": str(self.resolve(train["init"], "init", "train"))} if "init" in train else {}),
            **self.by_method(by_method, train.get("lr"), methods),
        }
        return StudyFile(
            study=self.resolve(tables.get("study", f"{self.path.stem}.sqlite"), "study"),
            comparison=comparison,
            search=search,
            report=self.resolve(tables["report"], "report") if "report" in tables else None,
            **{key: tables[key] for key in ("baseline", "device", "fleet") if key in tables},
        )

    def stream(self, table: Any) -> StreamOptions:
        if not isinstance(table, dict):
            raise MooringError(f"{self.path}: stream is a table: write [stream] and its keys below it")
        self.check(table, [field.name for field in fields(StreamOptions)], "stream")
        if "data" in table:
            table = {**table, "data": str(self.resolve(table["data"], "data", "stream"))}
        return StreamOptions(**table)

    def check_not_searched(self, train: Mapping[str, Any], by_method: Mapping[str, Any]) -> None:
        """Refuse settings that a search would ignore."""
        tables = {"train": train, **{f"method.{name}": table for name, table in by_method.items()}}
        for name, table in tables.items():
            for key in METHOD_KEYS:
                if isinstance(table, dict) and key in table:
                    raise MooringError(
                        f"{self.path}{self.line(key, name)}: {key} of [{name}] means nothing beside [tune], which "
                        f"searches it for every method: leave it out, or give {key}s in [tune]"
                    )

    def by_method(self, tables: Mapping[str, Any], lr: Any, methods: str | list[str]) -> dict[str, Any]:
        """Return the arguments lr and strength, with the values of single methods on top of the common lr."""
        for name, table in tables.items():
            if not isinstance(table, dict):
                raise MooringError(
                    f"{self.path}{self.line(name, 'method')}: [method.{name}] is a table with lr or strength"
                )
            self.check(table, METHOD_KEYS, f"method.{name}")
        lrs = {name: table["lr"] for name, table in tables.items() if "lr" in table}
        strengths = {name: table["strength"] for name, table in tables.items() if "strength" in table}
        if lrs and lr is not None:
            lrs = dict.fromkeys(resolve_methods(methods), lr) | {find_method(name).name: lrs[name] for name in lrs}
        arguments: dict[str, Any] = {} if lr is None else {"lr": lr}
        return arguments | ({"lr": lrs} if lrs else {}) | ({"strength": strengths} if strengths else {})

    def methods(self, names: Any) -> str | list[str]:
        if isinstance(names, str):
            return names
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise MooringError(f"{self.path}{self.line('methods')}: methods is a list of names")
        return names

    def seeds(self, value: Any) -> int | list[int]:
        numbers = value if isinstance(value, list) else [value]
        if not numbers or not all(isinstance(seed, int) and not isinstance(seed, bool) for seed in numbers):
            raise MooringError(f"{self.path}{self.line('seeds')}: seeds is how many, or a list of whole numbers")
        if not isinstance(value, list) and value < 1:
            raise MooringError(f"{self.path}{self.line('seeds')}: seeds={value} is not allowed: give at least 1")
        return value  # type: ignore[no-any-return]

    def table(self, tables: dict[str, Any], name: str) -> dict[str, Any]:
        table = tables.get(name, {})
        if not isinstance(table, dict):
            raise MooringError(f"{self.path}{self.line(name)}: {name} is a table: write [{name}] and its keys below it")
        return table

    def check(
        self, values: Mapping[str, Any], allowed: Any, table: str, types: Mapping[str, type] | None = None
    ) -> None:
        """Refuse unknown keys, and values of another type."""
        for key, value in values.items():
            if key not in allowed:
                kind = f"key of [{table}]" if table else "key"
                raise MooringError(f"{self.path}{self.line(key, table)}: {unknown(kind, key, allowed)}")
            expected = (types or {}).get(key)
            if expected is not None and (not isinstance(value, expected) or isinstance(value, bool)):
                description = {str: "text in quotes", int: "a whole number"}[expected]
                raise MooringError(f"{self.path}{self.line(key, table)}: {key} must be {description}, not {value!r}")

    def resolve(self, path: Any, key: str = "", table: str = "") -> Path:
        """Return a path relative to the folder of the file."""
        if not isinstance(path, str):
            raise MooringError(f"{self.path}{self.line(key, table)}: {key} must be a path in quotes, not {path!r}")
        if "\0" in path:
            raise MooringError(f"{self.path}{self.line(key, table)}: {key} must be a path, not {path!r}")
        return self.path.parent / Path(path).expanduser()

    def line(self, key: str, table: str = "") -> str:
        """Return ", line N" for a key; empty if the key cannot be located."""
        section = ""
        for number, line in enumerate(self.lines, 1):
            if header := re.match(r"\s*\[+\s*([^\]#]+?)\s*\]+", line):
                section = header[1].replace('"', "").replace(" ", "")
                if f"{table}.{key}".strip(".") == section:
                    return f", line {number}"
            elif section == table and re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*[=.]", line):
                return f", line {number}"
        if table:  # a dotted or inline table: name the line of the table instead
            return self.line(table.partition(".")[0])
        return ""
