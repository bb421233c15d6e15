"""The page of a reproduction: its header, tables, notes and figures, with the numbers and runs as JSON files."""

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from safetensors import SafetensorError, safe_open

from mooring.lab.model.atomic_files import check_writable, write_atomically
from mooring.lab.model.plurals import pluralize
from mooring.lab.model.results import Result
from mooring.lab.networks.initialization import BackboneWeights
from mooring.lab.streams.named_datasets import NAMED_DATASETS
from mooring.paper.context.paper_context import PaperContext
from mooring.paper.context.scale import Condition
from mooring.paper.context.target_result import PaperCell, ResultTable, TargetResult, means_agree
from mooring.paper.run_rows import runs_json
from mooring.paper.targets import TARGETS

BACKBONE_COLUMNS = ("network", "backbone", "fingerprint", "accuracy when pre-trained", "on")

CellKey = tuple[Condition, str, str]
"""Condition, method and metric of a cell."""


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
    write_atomically(folder / "runs.json", runs_json(runs, context.streams, context.scale))
    content = [{**result.to_json(), "figures": figures[result.name]} for result in results]
    write_atomically(folder / "findings.json", (json.dumps(content, indent=1) + "\n").encode())
    sections = [_section(result, figures[result.name]) for result in results]
    parts = [page_header(context, runs, command), _contents(results), *sections]
    write_atomically(folder / "index.md", ("\n\n".join(parts) + "\n").encode())
    return folder / "index.md"


def _write_figures(result: TargetResult, folder: Path) -> list[dict[str, str]]:
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


def page_header(context: PaperContext, runs: Sequence[Result], command: str) -> str:
    """Return what was trained, for how long, on what device and from which backbones, as Markdown."""
    scale = context.scale
    miniature = "A miniature on the embedded digits: it shows that every target works, and nothing about the paper."
    regimes = f" The main table has only {', '.join(scale.selected_regimes)}." if scale.selected_regimes else ""
    parts = [
        "# The paper, reproduced",
        miniature if "digits" in scale.streams else "",
        _training_summary(runs),
        f"Repeat with\n\n```\n{command}\n```",
        f"Data sets: {', '.join(scale.streams)}; {scale.seeds} seeds.{regimes}",
        _missing_data(context),
        _backbones(context),
        "`runs.json` has a row for each run; `findings.json` has everything below.",
    ]
    return "\n\n".join(part for part in parts if part)


def _training_summary(runs: Sequence[Result]) -> str:
    statuses = Counter(result.status for result in runs)
    outcome = ", ".join(f"{count} {status}" for status, count in sorted(statuses.items()))
    times: dict[str, float] = defaultdict(float)
    for result in runs:
        times[str(result.versions.get("device", "an unknown device"))] += result.seconds
    duration = " and ".join(f"{_format_duration(seconds)} on {device}" for device, seconds in times.items())
    steps = sum(result.steps for result in runs)
    rejected = " Rejected runs were stopped after the first task because their penalty would have extrapolated."
    return (
        f"{len(runs)} models were trained ({outcome or 'none'}), {steps:,} iterations in total. They took "
        f"{duration or 'no time'}; the time of a fleet is divided among its runs."
        f"{rejected if statuses['rejected'] else ''}"
    )


def _format_duration(seconds: float) -> str:
    """Return a duration as text.

    Example:
        >>> _format_duration(12.0), _format_duration(1230.0)
        ('12 seconds', '20.5 minutes')
    """
    return f"{seconds / 60:.1f} minutes" if seconds >= 60 else f"{seconds:.0f} seconds"


def _missing_data(context: PaperContext) -> str:
    layouts = {"folders": "public folder layout", "parquet": "layout on the Hub"}
    return "\n".join(
        f"- {name}: **not yet run**. Put it at `DIR/{name}` in its {layouts[NAMED_DATASETS[name].layout]} and repeat "
        "the command."
        for name in context.scale.missing_data
    )


def _backbones(context: PaperContext) -> str:
    if not context.weights:
        return "Every run starts from random weights."
    rows: list[dict[str, object]] = []
    for network in dict.fromkeys((context.scale.network, context.scale.second_network)):
        backbones = [context.weights[fingerprint] for fingerprint in context.backbones.get(network, [])]
        rows += [_backbone_row(network, weights) for weights in backbones]
        if not backbones:
            rows.append({"network": network, "backbone": "none: random start"})
    if context.other_backbone:
        name = f"{context.scale.network}, another (in reasons)"
        rows.append(_backbone_row(name, context.weights[context.other_backbone]))
    table = ResultTable("Backbones", BACKBONE_COLUMNS, rows).markdown()
    return f"Seed k starts from backbone k of its network, modulo their number:\n\n{table}"


def _backbone_row(network: str, weights: BackboneWeights) -> dict[str, object]:
    values = (network, Path(weights.path).name, weights.fingerprint, *_pretraining(Path(weights.path)))
    return dict(zip(BACKBONE_COLUMNS, values, strict=True))


def _pretraining(path: Path) -> tuple[float | None, str | None]:
    """Return accuracy and data set of the pre-training, from the metadata of the file; None where not given."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
        ours = json.loads(metadata.get("mooring", "{}"))
        accuracy = ours.get("accuracy", metadata.get("test_accuracy"))
        data = ours.get("stream", metadata.get("trained_on", "").split(",")[0] or None)
        return (None if accuracy is None else float(accuracy)), data
    except (OSError, SafetensorError, ValueError, AttributeError):
        return None, None


def add_table_notes(results: Sequence[TargetResult]) -> list[TargetResult]:
    """Return the results with a note below each table for every cell that differs from the paper's.

    Without the target `reasons` among the results, the notes say that nothing was tested.

    Example:
        >>> add_table_notes([TargetResult("grids", ["The search tried 112 settings."])])[0].text
        ['The search tried 112 settings.']
    """
    reasons = next((result.reasons for result in results if result.name == "reasons"), None)
    noted = []
    for result in results:
        cells = [cell for table in result.tables for cell in table.cells if cell.at_paper_setting]
        at_paper_setting = {(cell.condition, cell.method, cell.metric): cell for cell in cells}
        tables = [replace(table, notes=_notes(table, at_paper_setting, reasons)) for table in result.tables]
        noted.append(replace(result, tables=tables))
    return noted


def _notes(
    table: ResultTable, at_paper_setting: Mapping[CellKey, PaperCell], reasons: Mapping[CellKey, str] | None
) -> list[str]:
    differing = [cell for cell in table.cells if cell.probably_agrees is False]
    if differing and reasons is None:
        differ = "differs" if len(differing) == 1 else "differ"
        return [f"{pluralize(len(differing), 'cell')} {differ} from the paper; `mooring paper reasons` tests why."]
    notes: dict[str, list[str]] = {}
    for cell in differing:
        key = (cell.condition, cell.method, cell.metric)
        untested = f"not tested with {cell.condition.network} in {cell.condition.regime.name}"
        explanation = _explanation(cell, at_paper_setting.get(key), (reasons or {}).get(key) or untested)
        notes.setdefault(cell.method, []).append(f"{cell.metric} differs by {cell.difference:+.2f}: {explanation}")
    return [f"{method}: {'; '.join(parts)}." for method, parts in notes.items()]


def _explanation(cell: PaperCell, at_paper_setting: PaperCell | None, reason: str) -> str:
    """Return why a cell differs; the reasons were tested at the paper's setting."""
    if cell.at_paper_setting:
        return reason
    if at_paper_setting is None:
        return "not tested: no seed finished at the paper's setting"
    other = at_paper_setting.ours
    if other == cell.ours:  # both settings are the same
        return reason
    difference = f"{at_paper_setting.difference:+.2f}"
    if at_paper_setting.probably_agrees:
        if means_agree(cell.ours, other.mean, other.std, other.count) is False:
            return "explained by the setting: it agrees at the paper's setting"
        return f"at the paper's setting by {difference}, within chance, but the setting has no significant effect"
    if at_paper_setting.difference * cell.difference < 0:
        return f"in the opposite direction at the paper's setting, by {difference} ({reason})"
    return f"at the paper's setting by {difference}, {reason}"
