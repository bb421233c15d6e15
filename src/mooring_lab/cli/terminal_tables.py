"""Tables on a terminal, aligned text elsewhere, and JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mooring_lab.cli.pasted_tables import TextTable, merge_columns, render
from mooring_lab.model.method_versions import without_version
from mooring_lab.model.metric_definitions import DEFINITIONS, NOTATION
from mooring_lab.model.plurals import pluralize
from mooring_lab.model.spec import OPTIONAL_FIELDS
from mooring_lab.model.winners import winner

if TYPE_CHECKING:
    from mooring_lab.model.metrics import Interval
    from mooring_lab.model.summary import Row
    from mooring_lab.study.protocol import Choice

SHOWN_METRICS = ("accuracy", "forgetting_earlier", "forgetting", "learned")
"""The metrics of a table that is printed; CSV, JSON and pages have all of them."""

OPTIONAL_COLUMNS = (
    *("network", "epochs", "batch", "optimizer", "schedule", "momentum", "weight_decay", "memory", "heads", "buffers"),
    *("init", "dtype", "flips", "shifts", "data"),
)
"""Settings that get a column if the rows of a table differ in them; methods without a memory do not differ in it."""

MAX_SETTING_LENGTH = 24
"""Characters of a setting that a table shows; longer ones are names of networks and fingerprints."""


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], title: str = "", form: str = "table") -> None:
    """Print a table on stdout; `print_text_table` says how.

    Args:
        header: the name of each column.
        rows: the cells of each row.
        title: the line above the table.
        form: "table", "markdown", "latex" or "csv".
    """
    print_text_table(TextTable(title, tuple(header), tuple(map(tuple, rows))), form)


def print_text_table(table: TextTable, form: str = "table") -> None:
    """Print a table on stdout: with lines on a terminal, as aligned columns elsewhere, or to paste; numbers right."""
    if form != "table":
        typer.echo(render(table, form))
        if form == "markdown":
            typer.echo()  # a line right after a table would be a row of it
        return
    console = Console()
    header, rows, numeric = table.header, table.rows, table.numeric
    if console.is_terminal:
        shown = Table(
            box=SIMPLE_HEAD, title=table.title or None, title_justify="left", title_style="bold", pad_edge=False
        )
        for number, name in enumerate(header):
            shown.add_column(name, justify="right" if numeric[number] else "left", overflow="fold")
        for i, row in enumerate(rows):
            shown.add_row(*(Text(cell, "bold" if (i, j) in table.bold else "") for j, cell in enumerate(row)))
        console.print(shown, markup=False, highlight=False)
        return
    widths = [max(len(row[number]) for row in [header, *rows]) for number in range(len(header))]
    if table.title:
        typer.echo(table.title)
    for row in [header, *rows]:
        columns = zip(row, widths, numeric, strict=True)
        cells = [cell.rjust(width) if right else cell.ljust(width) for cell, width, right in columns]
        typer.echo("  ".join(cells).rstrip())


def print_rows(rows: Sequence[Row], baseline: str | None, form: str = "table") -> None:
    """Print a table for each stream with the metrics, mean and std over seeds, and their definitions.

    Args:
        rows: the results.
        baseline: the method of the column of differences; None leaves it out.
        form: "table", "markdown", "latex", or "csv", which is one table with all numbers.
    """
    if form == "csv":
        print_records([row.to_record() for row in rows])
        return
    for stream in dict.fromkeys(row.stream for row in rows):
        print_text_table(_rows_table([row for row in rows if row.stream == stream], baseline), form)
    print_definitions(_shown(rows), form)


def print_records(records: Sequence[dict[str, object]]) -> None:
    """Print records as one table in CSV, with all digits."""
    typer.echo(render(merge_columns(records), "csv"))


def print_definitions(names: Iterable[str], form: str = "table") -> None:
    """Print the definitions of metrics below a table; below one to paste, their formulas alone."""
    definitions = [DEFINITIONS[name] for name in names]
    lines = [f"{d}" if form == "table" else f"{d.title}: {d.formula}" for d in definitions]
    print_notes([*lines, NOTATION] if lines else [], form)


def print_notes(lines: Sequence[str], form: str = "table") -> None:
    """Print lines below a table as they are, as a paragraph of Markdown, or as comments of LaTeX; CSV has none."""
    if lines and form == "markdown":
        typer.echo("; ".join(lines) + ".")
    elif lines and form != "csv":
        typer.echo("\n".join(f"% {line}" if form == "latex" else line for line in lines))


def _shown(rows: Sequence[Row]) -> list[str]:
    """Return the metrics of a table: those that some row has."""
    return [name for name in SHOWN_METRICS if any(name in row.metrics for row in rows)]


def _rows_table(rows: Sequence[Row], baseline: str | None) -> TextTable:
    """Return the table of one stream, with the winner of each metric in bold where there is one."""
    several_lrs = len({row.setting.lr for row in rows}) > 1
    optional = [name for name in OPTIONAL_COLUMNS if len(_values(rows, name)) > 1]
    columns = [*(["lr"] if several_lrs else []), *optional]
    names = {row.setting.method: row.name for row in rows}
    versus = [f"vs {names.get(baseline, without_version(baseline))} [95 %]"] if baseline else []
    shown = _shown(rows)
    header = ["method", *columns, *(DEFINITIONS[name].column for name in shown), *versus, "verdict"]
    cells = []
    for row in rows:
        metrics = [_cell(row.metrics.get(name)) for name in shown]
        lr = [f"{row.setting.lr:g}"] if several_lrs else []
        settings = [_setting(row, name) for name in optional]
        difference = ["" if row.difference is None else row.difference.as_difference()] if baseline else []
        cells.append((row.label, *lr, *settings, *metrics, *difference, row.verdict))
    bold = set()
    for column, name in enumerate(shown, start=1 + len(columns)):
        best = winner(rows, name)
        bold |= {(number, column) for number, row in enumerate(rows) if row is best}
    seeds = sorted({len(row.results) for row in rows})
    count = pluralize(seeds[0], "seed") if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]} seeds"
    setting = rows[0].setting
    training = f"{setting.network}, {pluralize(setting.epochs, 'epoch')}, batch {setting.batch}"
    common_lr = "" if several_lrs else f", lr {setting.lr:g}"
    shared = [getattr(setting, name) for name in ("optimizer", "schedule") if name not in optional]
    unusual = "".join(f", {value}" for value in shared if value not in OPTIONAL_FIELDS.values())
    title = f"{rows[0].stream}: {training}{common_lr}{unusual}; mean ± std over {count}"
    return TextTable(title, tuple(header), tuple(cells), frozenset(bold))


def print_choices(choices: Sequence[Choice], form: str = "table") -> None:
    """Print the setting that a grid search chose, how many others tie with it, and what it dropped and why."""
    ties = any(choice.as_good for choice in choices)
    header = ("method", "lr", "strength", "accuracy %", *(["as good"] if ties else []), "tried", "dropped")
    for stream in dict.fromkeys(choice.stream for choice in choices):
        rows = []
        for choice in (choice for choice in choices if choice.stream == stream):
            best, dropped = choice.best, choice.dropped
            setting = best.setting if best else None
            rows.append(
                [
                    without_version(choice.method),
                    f"{setting.lr:g}" if setting else "none",
                    f"{setting.strength:g}" if setting and setting.strength is not None else "",
                    _cell(best.metrics.get("accuracy")) if best else "",
                    *([str(len(choice.as_good) or "")] if ties else []),
                    str(len(choice.grid)),
                    str(len(dropped)),
                    f"{dropped[0].label}: {dropped[0].unfinished[0].reason}" if dropped else "",
                ]
            )
        grids = (choice.grid for choice in choices if choice.stream == stream)
        title = next((grid[0].stream for grid in grids if grid), stream)
        print_table([*header, "first reason"], rows, f"searched {title}", form)


def format_bytes(count: int) -> str:
    """Return a number of bytes for people.

    Example:
        >>> format_bytes(184_320_000)
        '184 MB'
    """
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB" if count >= 1e6 else f"{count:,} bytes"


def as_json(content: Any) -> str:
    """Return JSON in which numbers that JSON cannot hold are null.

    Example:
        >>> as_json([float("nan")]).split()
        ['[', 'null', ']']
    """
    return json.dumps(_finite(content), indent=1)


def _finite(content: Any) -> Any:
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, dict):
        return {name: _finite(value) for name, value in content.items()}
    return [_finite(value) for value in content] if isinstance(content, list | tuple) else content


def _values(rows: Sequence[Row], name: str) -> set[Any]:
    """Return the values of a setting among the rows that have it."""
    return {value for row in rows if (value := getattr(row.setting, name)) is not None}


def _setting(row: Row, name: str) -> str:
    value = getattr(row.setting, name)
    return "random" if value == "" else "" if value is None else str(value)[:MAX_SETTING_LENGTH]


def _cell(value: Interval | None) -> str:
    return "" if value is None else str(value)
