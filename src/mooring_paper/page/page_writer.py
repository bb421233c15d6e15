"""Write the page of a reproduction: `index.md`, the numbers and runs as JSON, and every figure."""

import json
from collections.abc import Sequence
from pathlib import Path

from mooring_lab.model.atomic_files import check_writable, write_atomically
from mooring_lab.report.picture import Drawing, render_drawing
from mooring_lab.report.style import figure_style
from mooring_paper.context.paper_context import PaperContext, unique_runs
from mooring_paper.context.target_result import TargetResult
from mooring_paper.page.page_content import join_blocks, page_blocks, page_findings
from mooring_paper.run_rows import runs_json


def write_page(results: Sequence[TargetResult], folder: Path, context: PaperContext, *, command: str) -> Path:
    """Write `index.md`, `findings.json`, `runs.json`, and every figure as SVG and PNG.

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
    runs = unique_runs([context.kept_runs, *(result.results for result in results)])
    figures = {result.name: _write_figures(result, folder) for result in results}
    blocks = page_blocks(results, context, figures, runs, command=command)
    findings = [
        {
            **result.to_json(),
            "figures": [
                {"file": file, "title": drawing.title, "caption": drawing.caption, "alt": drawing.alt}
                for file, drawing in figures[result.name].items()
            ],
        }
        for result in results
    ]
    findings.append(page_findings(blocks).to_json())
    write_atomically(folder / "runs.json", runs_json(runs, context.streams, context.scale, command))
    write_atomically(folder / "findings.json", (json.dumps(findings, indent=1) + "\n").encode())
    write_atomically(folder / "index.md", f"# The paper, reproduced\n\n{join_blocks(blocks)}\n".encode())
    return folder / "index.md"


def _write_figures(result: TargetResult, folder: Path) -> dict[str, Drawing]:
    """Write the figures of a result, and return them by the name of their PNG files."""
    drawings = {}
    with figure_style():
        for drawing in result.draw():
            name = f"{result.name}-{drawing.name}"
            if drawing.figure is not None:
                image = render_drawing(drawing, result.name)
                write_atomically(folder / f"{name}.svg", image.svg)
                write_atomically(folder / f"{name}.png", image.png)
            drawings[f"{name}.png"] = drawing
    return drawings
