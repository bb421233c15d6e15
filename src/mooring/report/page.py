"""The page: what the template is given."""

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
"""By this mark in its head a page is known to be ours, to be replaced with its figures."""


@dataclass(frozen=True)
class Settings:
    """The specs of a section in short: what they share, and a table of what they differ in."""

    shared: Sequence[tuple[str, str]]
    names: Sequence[str]
    rows: Sequence[Sequence[str]]


def page(parts: Sequence[tuple[Section, Sequence[Picture]]], *, title: str, command: str) -> str:
    """One HTML page that needs nothing else."""
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
            # Only this script runs, even if a name in the page were to smuggle in another.
            digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
            parts=shown,
            baseline=next((section.baseline for section, _ in parts), None),
            made=_made(results),
        )
    )


def _made(results: Sequence[Result]) -> dict[str, Any]:
    """How it was made: versions and for how many runs, seeds, time."""
    versions = Counter(", ".join(f"{name} {result.versions[name]}" for name in result.versions) for result in results)
    return {
        "versions": [(printable(told) or "not kept", runs) for told, runs in versions.items()],
        "seeds": ranges(result.spec.seed for result in results),
        "runs": len(results),
        "steps": sum(result.steps for result in results),
        "time": duration(sum(result.seconds for result in results)),
    }


def _settings(entries: Sequence[Entry]) -> Settings:
    names = [*dict.fromkeys(name for entry in entries for name in entry.row.setting.to_json() if name != "seed")]
    rows = [[_value(getattr(entry.row.setting, name)) for name in names] for entry in entries]
    differ = [
        len(set(column)) > 1 or name == "method" for name, column in zip(names, zip(*rows, strict=True), strict=True)
    ]
    shared = [(name, value) for name, value, apart in zip(names, rows[0], differ, strict=True) if not apart]
    return Settings(
        shared,
        [name for name, apart in zip(names, differ, strict=True) if apart] + ["seeds"],
        [
            [value for value, apart in zip(row, differ, strict=True) if apart]
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
