"""A study file: a TOML file with the options of `mooring compare` or `mooring tune`."""

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
    """Read a study file; refuse unknown keys and wrong values by name.

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
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise MooringError(
            f"{path} cannot be read ({reason}): give a study as TOML; docs/studies.md shows every key"
        ) from error
    except tomllib.TOMLDecodeError as error:
        raise MooringError(f"{path} is not TOML: {error}") from error
    try:
        return _read(tables, path)
    except MooringError as error:
        raise MooringError(f"{path}: {error}") from error


def _read(tables: dict[str, Any], path: Path) -> StudyFile:
    top = {"study": str, "report": str, "baseline": str, "device": str, "fleet": int}
    _check(tables, TOP_KEYS, types=top)
    streams = tables.get("stream", {"name": "digits"})
    train, by_method = _table(tables, "train"), _table(tables, "method")
    _check(train, [field.name for field in fields(Training) if field.name != "paper"], "train")
    for name in by_method:
        _check(_table(by_method, name, f"method.{name}"), METHOD_KEYS, f"method.{name}")
    search = None
    if "tune" in tables:
        tune = _table(tables, "tune")
        _check(tune, list(TUNE_ARGUMENTS), "tune")
        search = {TUNE_ARGUMENTS[key]: value for key, value in tune.items()}
        _check_not_searched({"train": train, **{f"method.{name}": table for name, table in by_method.items()}})
    methods = tables.get("methods", COMPARED_METHODS.split(","))
    if not isinstance(methods, str | list) or not all(isinstance(name, str) for name in methods):
        raise MooringError("methods is a list of names")
    folder = path.parent
    comparison = {
        "stream": [_stream(table, folder) for table in (streams if isinstance(streams, list) else [streams])],
        "methods": methods,
        "seeds": _seeds(tables.get("seeds", 5)),
        **{key: value for key, value in train.items() if key not in ("lr", "init")},
        **({"init": str(_resolve(train["init"], "init", folder))} if "init" in train else {}),
        **_by_method(by_method, train.get("lr"), methods),
    }
    return StudyFile(
        study=_resolve(tables.get("study", f"{path.stem}.sqlite"), "study", folder),
        comparison=comparison,
        search=search,
        report=_resolve(tables["report"], "report", folder) if "report" in tables else None,
        **{key: tables[key] for key in ("baseline", "device", "fleet") if key in tables},
    )


def _stream(table: Any, folder: Path) -> StreamOptions:
    if not isinstance(table, dict):
        raise MooringError("stream is a table: write [stream] and its keys below it")
    _check(table, [field.name for field in fields(StreamOptions)], "stream")
    data = {"data": str(_resolve(table["data"], "data", folder))} if "data" in table else {}
    return StreamOptions(**{**table, **data})


def _check_not_searched(tables: Mapping[str, Any]) -> None:
    """Refuse settings that a search would ignore."""
    for name, table in tables.items():
        for key in METHOD_KEYS:
            if key in table:
                raise MooringError(
                    f"{key} of [{name}] means nothing beside [tune], which searches it for every method: "
                    f"leave it out, or give {key}s in [tune]"
                )


def _by_method(tables: Mapping[str, Any], lr: Any, methods: str | list[str]) -> dict[str, Any]:
    """Return the arguments lr and strength, with the values of single methods on top of the common lr."""
    lrs = {name: table["lr"] for name, table in tables.items() if "lr" in table}
    strengths = {name: table["strength"] for name, table in tables.items() if "strength" in table}
    if lrs and lr is not None:
        lrs = dict.fromkeys(resolve_methods(methods), lr) | {find_method(name).name: lrs[name] for name in lrs}
    arguments: dict[str, Any] = {} if lr is None else {"lr": lr}
    return arguments | ({"lr": lrs} if lrs else {}) | ({"strength": strengths} if strengths else {})


def _seeds(value: Any) -> int | list[int]:
    numbers = value if isinstance(value, list) else [value]
    if not numbers or not all(isinstance(seed, int) and not isinstance(seed, bool) for seed in numbers):
        raise MooringError("seeds is how many, or a list of whole numbers")
    if not isinstance(value, list) and value < 1:
        raise MooringError(f"seeds={value} is not allowed: give at least 1")
    return value  # type: ignore[no-any-return]


def _table(tables: Mapping[str, Any], name: str, title: str = "") -> dict[str, Any]:
    table = tables.get(name, {})
    if not isinstance(table, dict):
        raise MooringError(f"{title or name} is a table: write [{title or name}] and its keys below it")
    return table


def _check(values: Mapping[str, Any], allowed: Any, table: str = "", types: Mapping[str, type] | None = None) -> None:
    """Refuse unknown keys, and values of another type."""
    for key, value in values.items():
        if key not in allowed:
            raise unknown(f"key of [{table}]" if table else "key", key, allowed)
        expected = (types or {}).get(key)
        if expected is not None and (not isinstance(value, expected) or isinstance(value, bool)):
            description = {str: "text in quotes", int: "a whole number"}[expected]
            raise MooringError(f"{key} must be {description}, not {value!r}")


def _resolve(path: Any, key: str, folder: Path) -> Path:
    """Return a path relative to the folder of the file."""
    if not isinstance(path, str):
        raise MooringError(f"{key} must be a path in quotes, not {path!r}")
    if "\0" in path:
        raise MooringError(f"{key} must be a path, not {path!r}")
    return folder / Path(path).expanduser()
