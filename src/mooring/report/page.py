"""Render the HTML page from its template."""

import base64
import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from mooring.lab.model.results import Result
from mooring.report.narrative import compared, duration, outcome, ranges
from mooring.report.numbers import printable
from mooring.report.picture import Picture
from mooring.report.section import Entry, Section
from mooring.report.section_tables import comparison, stability, unfinished

__all__ = ["GENERATOR", "page"]

GENERATOR = "mooring report"
"""The generator in the head of a page; a page with it, and its figures, may be replaced."""


@dataclass(frozen=True)
class Settings:
    """The settings of a section: the values that all share, and a table of the others."""

    shared: Sequence[tuple[str, str]]
    names: Sequence[str]
    rows: Sequence[Sequence[str]]


def page(parts: Sequence[tuple[Section, Sequence[Picture]]], *, title: str, command: str) -> str:
    """Return one self-contained HTML page."""
    results = [result for section, _ in parts for result in section.results]
    script = _asset("page.js")
    shown = [
        {
            "section": section,
            "pictures": pictures,
            "compared": compared(section),
            "outcome": outcome(section),
            "comparison": comparison(section),
            "stability": stability(section),
            "unfinished": unfinished(section),
            "settings": _settings(section.entries),
        }
        for section, pictures in parts
    ]
    return (
        _environment()
        .get_template("page.html.jinja")
        .render(
            title=printable(title, 300),
            command="\n".join(printable(line, 10_000) for line in command.splitlines()),
            generator=GENERATOR,
            style=Markup(_asset("page.css")),
            script=Markup(script),
            # The page allows this script alone, in case a name brings in another.
            digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
            parts=shown,
            baseline=next((section.baseline for section, _ in parts), None),
            provenance=_provenance(results),
        )
    )


def _provenance(results: Sequence[Result]) -> dict[str, Any]:
    """Return versions (with their numbers of runs), seeds, runs, steps and time."""
    versions = Counter(", ".join(f"{name} {result.versions[name]}" for name in result.versions) for result in results)
    return {
        "versions": [(printable(version) or "not recorded", runs) for version, runs in versions.items()],
        "seeds": ranges(result.spec.seed for result in results),
        "runs": len(results),
        "steps": sum(result.steps for result in results),
        "time": duration(sum(result.seconds for result in results)),
    }


def _settings(entries: Sequence[Entry]) -> Settings:
    names = [*dict.fromkeys(name for entry in entries for name in entry.row.setting.to_json() if name != "seed")]
    rows = [[_value(getattr(entry.row.setting, name)) for name in names] for entry in entries]
    varies = [
        len(set(column)) > 1 or name == "method" for name, column in zip(names, zip(*rows, strict=True), strict=True)
    ]
    shared = [(name, value) for name, value, varying in zip(names, rows[0], varies, strict=True) if not varying]
    return Settings(
        shared,
        [name for name, varying in zip(names, varies, strict=True) if varying] + ["seeds"],
        [
            [value for value, varying in zip(row, varies, strict=True) if varying]
            + [ranges(result.spec.seed for result in entry.row.results)]
            for row, entry in zip(rows, entries, strict=True)
        ],
    )


def _value(value: object) -> str:
    return "none" if value is None or value == "" else printable(f"{value}")


@cache
def _environment() -> Environment:
    loader = FunctionLoader(_asset)
    return Environment(autoescape=True, loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)


def _asset(name: str) -> str:
    return files("mooring.report").joinpath(name).read_text(encoding="utf-8")
