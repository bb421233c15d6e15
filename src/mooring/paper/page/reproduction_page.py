"""A reproduction on disk: the page, its figures, and the numbers as JSON."""

import json
from collections.abc import Sequence
from pathlib import Path

from mooring.lab.model.atomic_files import check_writable, write_atomically
from mooring.paper.context.context import Laboratory
from mooring.paper.context.result import Finding
from mooring.paper.page.page_header import head
from mooring.paper.page.runs_json import written
from mooring.paper.targets import TARGETS

__all__ = ["write_findings"]


def write_findings(findings: Sequence[Finding], folder: Path, lab: Laboratory, *, command: str) -> Path:
    """Write `index.md`, `findings.json`, `runs.json` with one row for each run, and every figure as SVG and PNG.

    Each file is replaced whole or not at all, the page last.

    Args:
        findings: what the targets found.
        folder: where to write; made where it is missing.
        lab: where their runs come from.
        command: what made them, to be repeated.

    Returns:
        The page.
    """
    check_writable(folder)
    runs = list({result.spec.key: result for finding in findings for result in finding.results}.values())
    figures = {finding.name: _drawn(finding, folder) for finding in findings}
    write_atomically(folder / "runs.json", written(runs))
    told = [{**finding.to_json(), "figures": figures[finding.name]} for finding in findings]
    write_atomically(folder / "findings.json", (json.dumps(told, indent=1) + "\n").encode())
    parts = [
        head(lab, runs, command),
        _contents(findings),
        *(_section(finding, figures[finding.name]) for finding in findings),
    ]
    write_atomically(folder / "index.md", ("\n\n".join(parts) + "\n").encode())
    return folder / "index.md"


def _drawn(finding: Finding, folder: Path) -> list[dict[str, str]]:
    """Draw the figures; their names and what is said about them."""
    from mooring.report.picture import picture  # matplotlib is slow to import
    from mooring.report.style import drawing

    with drawing():
        pictures = [(made, picture(made, finding.name)) for made in finding.draw()]
    for _, each in pictures:
        write_atomically(folder / f"{each.name}.svg", each.svg)
        write_atomically(folder / f"{each.name}.png", each.png)
    return [
        {"file": f"{each.name}.png", "title": each.title, "caption": each.caption, "alt": made.alt}
        for made, each in pictures
    ]


def _heading(finding: Finding) -> str:
    return f"{finding.name}: {TARGETS[finding.name].line}"


def _contents(findings: Sequence[Finding]) -> str:
    """A link to each section, by the anchors that Markdown is shown with: letters, digits and hyphens."""
    links = []
    for finding in findings:
        letters = [each for each in _heading(finding).lower().replace(" ", "-") if each.isalnum() or each == "-"]
        links.append(f"- [{finding.name}](#{''.join(letters)}): {TARGETS[finding.name].line}")
    return "\n".join(links)


def _section(finding: Finding, figures: Sequence[dict[str, str]]) -> str:
    text = "\n".join(f"- {line}" for line in finding.text) if len(finding.text) > 1 else "".join(finding.text)
    parts = [f"## {_heading(finding)}", *([text] if text else [])]
    parts += [f"![{each['alt']}]({each['file']})\n\n{each['caption']}" for each in figures]
    for table in finding.tables:
        parts += [f"### {table.title}", table.markdown()]
        if table.notes:
            parts += ["Why cells differ:", "\n".join(f"- {note}" for note in table.notes)]
    return "\n\n".join(parts)
