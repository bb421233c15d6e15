"""A reproduction on disk: the page, its figures, and the numbers as JSON."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mooring.lab.files import check_writable, write_whole
from mooring.lab.results import Result
from mooring.paper.finding import Finding
from mooring.paper.targets import TARGETS

__all__ = ["write_findings"]

SCORES = ("accuracy", "forgetting", "learned")


def write_findings(findings: Sequence[Finding], folder: Path, *, command: str) -> Path:
    """Write `index.md`, `findings.json`, `runs.json` with one row for each run, and every figure as SVG and PNG.

    Each file is replaced whole or not at all, the page last.

    Args:
        findings: what the targets found.
        folder: where to write; made where it is missing.
        command: what made them, to be repeated.

    Returns:
        The page.
    """
    check_writable(folder)
    runs = list({result.spec.key: result for finding in findings for result in finding.results}.values())
    figures = {finding.name: _drawn(finding, folder) for finding in findings}
    write_whole(folder / "runs.json", _lines([_row(result) for result in runs]))
    told = [{**finding.to_json(), "figures": figures[finding.name]} for finding in findings]
    write_whole(folder / "findings.json", (json.dumps(told, indent=1) + "\n").encode())
    parts = [_head(runs, command), *(_section(finding, figures[finding.name]) for finding in findings)]
    write_whole(folder / "index.md", ("\n\n".join(parts) + "\n").encode())
    return folder / "index.md"


def _drawn(finding: Finding, folder: Path) -> list[dict[str, str]]:
    """Draw the figures; their names and what is said about them."""
    from mooring.report.picture import picture  # matplotlib is slow to import
    from mooring.report.style import drawing

    with drawing():
        pictures = [(made, picture(made, finding.name)) for made in finding.draw()]
    for _, each in pictures:
        write_whole(folder / f"{each.name}.svg", each.svg)
        write_whole(folder / f"{each.name}.png", each.png)
    return [
        {"file": f"{each.name}.png", "title": each.title, "caption": each.caption, "alt": made.alt}
        for made, each in pictures
    ]


def _row(result: Result) -> dict[str, Any]:
    """A run in a line: what it was, and what came of it."""
    spec = result.spec.to_json()
    finished = result.status == "finished"
    scores = {name: round(result.metrics[name], 4) if finished else None for name in SCORES}
    rest = {"steps": result.steps, "seconds": round(result.seconds, 4), "versions": result.versions}
    return {"key": result.spec.key, **spec, "status": result.status, "reason": result.reason, **scores, **rest}


def _lines(rows: Sequence[dict[str, Any]]) -> bytes:
    """A list with a row on each line."""
    return ("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n").encode()


def _head(runs: Sequence[Result], command: str) -> str:
    statuses = Counter(result.status for result in runs)
    ended = ", ".join(f"{count} {status}" for status, count in sorted(statuses.items()))
    seconds = sum(result.seconds for result in runs)
    where = sorted({str(result.versions.get("device", "")) for result in runs} - {""})
    took = f"{seconds / 60:.1f} minutes" if seconds >= 60 else f"{seconds:.0f} seconds"
    on = f" on {', '.join(where)}" if where else ""
    return (
        f"# The paper, reproduced\n\n{len(runs)} models were trained ({ended}); together they took {took}{on}. Repeat "
        f"with\n\n```\n{command}\n```\n\nEach run is a row of `runs.json`; "
        "everything below is in `findings.json` too."
    )


def _section(finding: Finding, figures: Sequence[dict[str, str]]) -> str:
    parts = [f"## {finding.name}: {TARGETS[finding.name].line}", *finding.text]
    parts += [f"![{each['alt']}]({each['file']})\n\n{each['caption']}" for each in figures]
    for table in finding.tables:
        parts += [f"### {table.title}", table.markdown()]
        if table.notes:
            parts += ["Why cells differ:", "\n".join(f"- {note}" for note in table.notes)]
    return "\n\n".join(parts)
