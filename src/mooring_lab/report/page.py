"""Render the HTML page from its template."""

import base64
import hashlib
from collections import Counter
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from mooring_lab.model.metric_definitions import DEFINITIONS, NOTATION
from mooring_lab.model.results import Result
from mooring_lab.report.narrative import compared, duration, headline, outcome, ranges
from mooring_lab.report.numbers import printable
from mooring_lab.report.picture import Picture
from mooring_lab.report.section import Entry, Section
from mooring_lab.report.section_tables import comparison, stability, unfinished

GENERATOR = "mooring report"
"""The generator in the head of a page; a page with it, and its figures, may be replaced."""


def page(parts: Sequence[tuple[Section, Sequence[Picture]]], *, title: str | None, command: str) -> str:
    """Return one self-contained HTML page; without a title it is named after its methods and streams."""
    title = title or headline([section for section, _ in parts])
    results = [result for section, _ in parts for result in section.results]
    shown = [
        {
            "section": section,
            "pictures": pictures,
            "compared": compared(section),
            "outcome": outcome(section),
            "comparison": comparison(section),
            "stability": stability(section),
            "unfinished": unfinished(section),
            "seeds": ranges(result.spec.seed for result in section.results),
            "settings": _settings(section.entries),
        }
        for section, pictures in parts
    ]
    template = _environment().get_template("page.html.jinja")
    body = template.render(
        title=printable(title, 300),
        command="\n".join(printable(line, 10_000) for line in command.splitlines()),
        parts=shown,
        baseline=next((section.baseline for section, _ in parts), None),
        provenance=_provenance(results),
        terms=_terms(shown, results),
        definitions=DEFINITIONS,
        notation=NOTATION,
    )
    return standalone_page(Markup(body), title=title, generator=GENERATOR, script=_asset("page.js"))


def standalone_page(body: Markup, *, title: str, generator: str, script: str = "") -> str:
    """Return a self-contained HTML page in the style of the report; it loads nothing from elsewhere.

    Example:
        >>> "default-src 'none'" in standalone_page(Markup("<p>Done.</p>"), title="Digits", generator="mooring")
        True
    """
    return (
        _environment()
        .get_template("standalone.html.jinja")
        .render(
            title=printable(title, 300),
            generator=generator,
            style=Markup(_asset("page.css")),
            body=body,
            script=Markup(script),
            # The page allows this script alone, in case a name brings in another.
            digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        )
    )


def _terms(parts: Sequence[dict[str, Any]], results: Sequence[Result]) -> set[str]:
    """Return the terms that the page needs to explain, besides the metrics of every page."""
    figures = {picture.name.rpartition("-")[2] for part in parts for picture in part["pictures"]}
    rows = [entry.row for part in parts for entry in part["section"].entries]
    several_seeds = any(len(row.results) > 1 for row in rows)
    used = {
        "intransigence": any("intransigence" in row.metrics for row in rows),
        "interval": several_seeds,
        "stability": any(part["stability"] for part in parts),
        "unfinished": any(result.status != "finished" for result in results),
    }
    return figures | {term for term, present in used.items() if present}


def _provenance(results: Sequence[Result]) -> dict[str, Any]:
    """Return versions (with their numbers of runs), seeds, runs, steps and time."""
    versions = Counter(", ".join(f"{name} {result.versions[name]}" for name in result.versions) for result in results)
    return {
        "versions": [(printable(version), runs) for version, runs in versions.items() if version],
        "seeds": ranges(result.spec.seed for result in results),
        "runs": len(results),
        "steps": sum(result.steps for result in results),
        "time": duration(sum(result.seconds for result in results)),
    }


def _settings(entries: Sequence[Entry]) -> dict[str, Any]:
    """Return the settings that all entries share, without those that are not used, and a table of the others."""
    names = [*dict.fromkeys(name for entry in entries for name in entry.row.setting.to_json() if name != "seed")]
    values = {name: [_value(getattr(entry.row.setting, name)) for entry in entries] for name in names}
    varying = [name for name in names if len(set(values[name])) > 1 or name in ("method", "data")]
    shared = [(name, values[name][0]) for name in names if name not in varying and values[name][0] != "none"]
    seeds = [ranges(result.spec.seed for result in entry.row.results) for entry in entries]
    rows = list(zip(*(values[name] for name in varying), seeds, strict=True))
    return {"shared": [pair for pair in shared if pair[0] != "stream"], "names": [*varying, "seeds"], "rows": rows}


def _value(value: object) -> str:
    return "none" if value is None or value == "" else printable(f"{value}")


@cache
def _environment() -> Environment:
    loader = FunctionLoader(_asset)
    return Environment(autoescape=True, loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)


def _asset(name: str) -> str:
    return files("mooring_lab.report").joinpath(name).read_text(encoding="utf-8")
