"""Write the page of a reproduction: `index.md`, `index.html`, the numbers and runs as JSON, and every figure."""

import json
from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from mooring_lab.model.atomic_files import check_writable, write_atomically
from mooring_paper.context.paper_context import PaperContext
from mooring_paper.context.target_result import TargetResult
from mooring_paper.page.backbone_levels import read_findings
from mooring_paper.page.blocks import Block, FigureBlock
from mooring_paper.page.page_content import OtherReproduction, page_blocks, page_findings
from mooring_paper.run_rows import runs_json

TITLE = "The paper, reproduced"
GENERATOR = "mooring paper"


def write_page(
    results: Sequence[TargetResult],
    folder: Path,
    context: PaperContext,
    *,
    command: str,
    other_findings: Path | None = None,
) -> Path:
    """Write `index.md`, `index.html`, `findings.json`, `runs.json`, and every figure as SVG and PNG.

    Each file is written atomically, the pages last. The HTML page needs no other file.

    Args:
        results: the results of targets.
        folder: the folder to write to; created if missing.
        context: the source of their runs.
        command: the command that repeats the reproduction.
        other_findings: the `findings.json` of a reproduction from other backbones, to compare with.

    Returns:
        The path of the Markdown page.

    Raises:
        MooringError: if the other findings cannot be read, or the folder cannot be written.
    """
    other = None if other_findings is None else _other_reproduction(other_findings, folder)
    check_writable(folder)
    runs = list({run.spec.key: run for result in results for run in result.results}.values())
    figures = {result.name: _write_figures(result, folder) for result in results}
    findings = [{**result.to_json(), "figures": [_texts(f) for f in figures[result.name]]} for result in results]
    blocks = page_blocks(results, context, figures, runs, command=command, other=other)
    findings.append(page_findings(blocks).to_json())
    write_atomically(folder / "runs.json", runs_json(runs, context.streams, context.scale))
    write_atomically(folder / "findings.json", (json.dumps(findings, indent=1) + "\n").encode())
    write_atomically(folder / "index.html", _html(blocks).encode())
    markdown = "\n\n".join([f"# {TITLE}", *(block.markdown() for block in blocks)])
    write_atomically(folder / "index.md", f"{markdown}\n".encode())
    return folder / "index.md"


def _write_figures(result: TargetResult, folder: Path) -> list[FigureBlock]:
    from mooring_lab.report.picture import render_drawing  # matplotlib is slow to import
    from mooring_lab.report.style import figure_style

    with figure_style():
        pictures = [(figure, render_drawing(figure, result.name)) for figure in result.draw()]
    for _, image in pictures:
        write_atomically(folder / f"{image.name}.svg", image.svg)
        write_atomically(folder / f"{image.name}.png", image.png)
    return [
        FigureBlock(f"{image.name}.png", image.title, image.caption, figure.alt, image.inline)
        for figure, image in pictures
    ]


def _texts(figure: FigureBlock) -> dict[str, str]:
    return {"file": figure.file, "title": figure.title, "caption": figure.caption, "alt": figure.alt}


def _html(blocks: Sequence[Block]) -> str:
    from mooring_lab.report.page import standalone_page

    content = Markup("\n").join(block.html() for block in blocks)
    body = Markup("<header>\n<h1>{}</h1>\n</header>\n<main>\n{}\n</main>").format(TITLE, content)
    return standalone_page(body, title=TITLE, generator=GENERATOR)


def _other_reproduction(findings: Path, folder: Path) -> OtherReproduction:
    return OtherReproduction(read_findings(findings), _relative_page(findings, folder))


def _relative_page(findings: Path, folder: Path) -> str:
    """Return the page next to other findings, if one of the two folders contains the other; empty otherwise.

    Example:
        >>> _relative_page(Path("docs/strong/findings.json"), Path("docs"))
        'strong/index.md'
        >>> _relative_page(Path("docs/findings.json"), Path("docs/strong"))
        '../index.md'
        >>> _relative_page(Path("elsewhere/findings.json"), Path("docs"))
        ''
    """
    there, here = findings.resolve().parent, folder.resolve()
    if there.is_relative_to(here):
        return (there.relative_to(here) / "index.md").as_posix()
    if here.is_relative_to(there):
        return "/".join([*[".."] * len(here.relative_to(there).parts), "index.md"])
    return ""
