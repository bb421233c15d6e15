"""A study written down: a TOML file that says what `mooring compare` or `mooring tune` would be told."""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from mooring.errors import MooringError, unknown
from mooring.lab.methods import find_method, resolve_methods
from mooring.lab.model.training import Training
from mooring.lab.streams.options import StreamOptions
from mooring.lab.study.defaults import COMPARED_METHODS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

__all__ = ["StudyFile", "read_study_file"]

TOP = ("study", "report", "baseline", "device", "fleet", "methods", "seeds", "stream", "train", "method", "tune")
TUNE = {"tasks": "tasks", "lrs": "lrs", "strengths": "strengths", "seeds": "search_seeds"}
METHOD = ("lr", "strength")


@dataclass(frozen=True)
class StudyFile:
    """What a study file says.

    Attributes:
        study: where results are kept: by default beside the file, under its name.
        comparison: the arguments of `mooring.lab.study.comparison.comparison`.
        search: the arguments of `mooring.lab.study.protocol.tune` beside those; None where nothing is searched.
        report: where the page goes; None for nowhere.
        baseline: the method to compare accuracy with.
        device: where to compute.
        fleet: the most runs at once.
    """

    study: Path
    comparison: dict[str, Any]
    search: dict[str, Any] | None = None
    report: Path | None = None
    baseline: str | None = None
    device: str = "cpu"
    fleet: int | None = None


def read_study_file(path: Path | str) -> StudyFile:
    """Read a study file; what it does not know is refused with its line.

    Paths in it are taken from the folder that it lies in.

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
        told = tomllib.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise MooringError(
            f"{path} cannot be read ({reason}): give a study as TOML; docs/studies.md shows every key"
        ) from error
    except tomllib.TOMLDecodeError as error:
        raise MooringError(f"{path} is not TOML: {error}") from error
    return _Reader(path, text).read(told)


class _Reader:
    """One file, for messages that name a line."""

    def __init__(self, path: Path, text: str) -> None:
        self.path, self.lines = path, text.splitlines()

    def read(self, told: dict[str, Any]) -> StudyFile:
        self.check(told, TOP, "", {"study": str, "report": str, "baseline": str, "device": str, "fleet": int})
        streams = told.get("stream", {"name": "digits"})
        train = self.table(told, "train")
        self.check(train, [each.name for each in fields(Training) if each.name != "paper"], "train")
        search = None
        if "tune" in told:
            search = {TUNE[key]: value for key, value in self.table(told, "tune").items() if self.known(key)}
            self.untuned(train, self.table(told, "method"))
        methods = self.methods(told.get("methods", COMPARED_METHODS.split(",")))
        comparison = {
            "stream": [self.stream(each) for each in (streams if isinstance(streams, list) else [streams])],
            "methods": methods,
            "seeds": self.seeds(told.get("seeds", 5)),
            **{key: value for key, value in train.items() if key not in ("lr", "init")},
            **({"init": str(self.near(train["init"], "init", "train"))} if "init" in train else {}),
            **self.by_method(self.table(told, "method"), train.get("lr"), methods),
        }
        return StudyFile(
            study=self.near(told.get("study", f"{self.path.stem}.sqlite"), "study"),
            comparison=comparison,
            search=search,
            report=self.near(told["report"], "report") if "report" in told else None,
            **{key: told[key] for key in ("baseline", "device", "fleet") if key in told},
        )

    def stream(self, told: Any) -> StreamOptions:
        if not isinstance(told, dict):
            raise MooringError(f"{self.path}: stream is a table: write [stream] and its keys below it")
        self.check(told, [each.name for each in fields(StreamOptions)], "stream")
        rest = {**told, "data": str(self.near(told["data"], "data", "stream"))} if "data" in told else told
        return StreamOptions(**rest)

    def untuned(self, train: Mapping[str, Any], methods: Mapping[str, Any]) -> None:
        """Refuse settings that a search would not look at."""
        tables = {"train": train, **{f"method.{name}": given for name, given in methods.items()}}
        for table, given in tables.items():
            for key in METHOD:
                if isinstance(given, dict) and key in given:
                    raise MooringError(
                        f"{self.path}{self.line(key, table)}: {key} of [{table}] means nothing beside [tune], which "
                        f"searches it for every method: leave it out, or give {key}s in [tune]"
                    )

    def by_method(self, told: Mapping[str, Any], lr: Any, methods: str | list[str]) -> dict[str, Any]:
        """lr and strength of single methods, on top of the common lr."""
        found: dict[str, Any] = {} if lr is None else {"lr": lr}
        rates: dict[str, Any] = {}
        strengths: dict[str, Any] = {}
        for name, given in told.items():
            if not isinstance(given, dict):
                raise MooringError(
                    f"{self.path}{self.line(name, 'method')}: [method.{name}] is a table with lr or strength"
                )
            self.check(given, METHOD, f"method.{name}")
            rates |= {name: given["lr"]} if "lr" in given else {}
            strengths |= {name: given["strength"]} if "strength" in given else {}
        if rates and lr is not None:
            rates = dict.fromkeys(resolve_methods(methods), lr) | {
                find_method(name).name: rate for name, rate in rates.items()
            }
        return {**found, **({"lr": rates} if rates else {}), **({"strength": strengths} if strengths else {})}

    def methods(self, told: Any) -> str | list[str]:
        if isinstance(told, str):
            return told
        if not isinstance(told, list) or not all(isinstance(name, str) for name in told):
            raise MooringError(f"{self.path}{self.line('methods')}: methods is a list of names")
        return told

    def seeds(self, told: Any) -> int | list[int]:
        each = told if isinstance(told, list) else [told]
        if not each or not all(isinstance(seed, int) and not isinstance(seed, bool) for seed in each):
            raise MooringError(f"{self.path}{self.line('seeds')}: seeds is how many, or a list of whole numbers")
        if not isinstance(told, list) and told < 1:
            raise MooringError(f"{self.path}{self.line('seeds')}: seeds={told} is not allowed: give at least 1")
        return told  # type: ignore[no-any-return]

    def known(self, key: str) -> bool:
        self.check({key: None}, list(TUNE), "tune")
        return True

    def table(self, told: dict[str, Any], name: str) -> dict[str, Any]:
        found = told.get(name, {})
        if not isinstance(found, dict):
            raise MooringError(f"{self.path}{self.line(name)}: {name} is a table: write [{name}] and its keys below it")
        return found

    def check(self, told: Mapping[str, Any], allowed: Any, table: str, kinds: Mapping[str, type] | None = None) -> None:
        """Refuse keys that mean nothing, and values of another kind."""
        for key, value in told.items():
            if key not in allowed:
                where = f"key of [{table}]" if table else "key"
                raise MooringError(f"{self.path}{self.line(key, table)}: {unknown(where, key, allowed)}")
            kind = (kinds or {}).get(key)
            if kind is not None and (not isinstance(value, kind) or isinstance(value, bool)):
                what = {str: "text in quotes", int: "a whole number"}[kind]
                raise MooringError(f"{self.path}{self.line(key, table)}: {key} must be {what}, not {value!r}")

    def near(self, path: Any, key: str = "", table: str = "") -> Path:
        """A path from the file's own folder."""
        if not isinstance(path, str):
            raise MooringError(f"{self.path}{self.line(key, table)}: {key} must be a path in quotes, not {path!r}")
        if "\0" in path:
            raise MooringError(f"{self.path}{self.line(key, table)}: {key} must be a path, not {path!r}")
        return self.path.parent / Path(path).expanduser()

    def line(self, key: str, table: str = "") -> str:
        """Where a key stands, for messages; empty where it cannot be told."""
        inside = ""
        for number, line in enumerate(self.lines, 1):
            if header := re.match(r"\s*\[+\s*([^\]#]+?)\s*\]+", line):
                inside = header[1].replace('"', "").replace(" ", "")
                if f"{table}.{key}".strip(".") == inside:
                    return f", line {number}"
            elif inside == table and re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*[=.]", line):
                return f", line {number}"
        if table:  # written with dots or in braces: where its table stands
            return self.line(table.partition(".")[0])
        return ""
