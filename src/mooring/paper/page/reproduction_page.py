"""The files of a reproduction: the page, its figures, and the numbers as JSON."""

import json
from collections.abc import Sequence
from pathlib import Path

from mooring.lab.model.atomic_files import check_writable, write_atomically
from mooring.paper.context.paper_context import PaperContext
from mooring.paper.context.target_result import TargetResult
from mooring.paper.page.page_header import page_header
from mooring.paper.page.runs_json import runs_json
from mooring.paper.targets import TARGETS

__all__ = ["write_page"]


def write_page(results: Sequence[TargetResult], folder: Path, context: PaperContext, *, command: str) -> Path:
    """Write `index.md`, `findings.json`, `runs.json` with one row for each run, and every figure as SVG and PNG.

    Each file is written atomically, the page last.

    Args:
        results: the results of targets.
        folder: the folder to write to; created if missing.
        context: the source of their runs.
        command: the command that repeats the reproduction.

    Returns:
        The path of the page.
    """
    check_writable(folder)
    runs = list({run.spec.key: run for result in results for run in result.results}.values())
    figures = {result.name: _write_figures(result, folder) for result in results}
    write_atomically(folder / "runs.json", runs_json(runs))
    content = [{**result.to_json(), "figures": figures[result.name]} for result in results]
    write_atomically(folder / "findings.json", (json.dumps(content, indent=1) + "\n").encode())
    parts = [
        page_header(context, runs, command),
        _contents(results),
        *(_section(result, figures[result.name]) for result in results),
    ]
    write_atomically(folder / "index.md", ("\n\n".join(parts) + "\n").encode())
    return folder / "index.md"


def _write_figures(result: TargetResult, folder: Path) -> list[dict[str, str]]:
    """Write the figures of a result and return their file names and texts."""
    from mooring.report.picture import render_drawing  # matplotlib is slow to import
    from mooring.report.style import figure_style

    with figure_style():
        pictures = [(figure, render_drawing(figure, result.name)) for figure in result.draw()]
    for _, image in pictures:
        write_atomically(folder / f"{image.name}.svg", image.svg)
        write_atomically(folder / f"{image.name}.png", image.png)
    return [
        {"file": f"{image.name}.png", "title": image.title, "caption": image.caption, "alt": figure.alt}
        for figure, image in pictures
    ]


def _heading(result: TargetResult) -> str:
    return f"{result.name}: {TARGETS[result.name].summary}"


def _contents(results: Sequence[TargetResult]) -> str:
    """Return a link to each section; Markdown anchors keep letters, digits and hyphens."""
    links = []
    for result in results:
        letters = [c for c in _heading(result).lower().replace(" ", "-") if c.isalnum() or c == "-"]
        links.append(f"- [{result.name}](#{''.join(letters)}): {TARGETS[result.name].summary}")
    return "\n".join(links)


def _section(result: TargetResult, figures: Sequence[dict[str, str]]) -> str:
    text = "\n".join(f"- {line}" for line in result.text) if len(result.text) > 1 else "".join(result.text)
    parts = [f"## {_heading(result)}", *([text] if text else [])]
    parts += [f"![{figure['alt']}]({figure['file']})\n\n{figure['caption']}" for figure in figures]
    for table in result.tables:
        parts += [f"### {table.title}", table.markdown()]
        if table.notes:
            parts += ["Why cells differ:", "\n".join(f"- {note}" for note in table.notes)]
    return "\n\n".join(parts)
