"""Tables on a terminal, aligned text elsewhere, and JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from mooring.lab.model.plurals import pluralize

if TYPE_CHECKING:
    from mooring.lab.model.metrics import Interval
    from mooring.lab.model.summary import Row
    from mooring.lab.study.protocol import Choice

OPTIONAL_COLUMNS = (
    *("network", "epochs", "batch", "momentum", "weight_decay", "memory", "heads", "init", "dtype", "schedule"),
    *("flips", "shifts", "data"),
)
"""Settings that get a column if the rows of a table differ in them; methods without a memory do not differ in it."""

MAX_SETTING_LENGTH = 24
"""Characters of a setting that a table shows; longer ones are names of networks and fingerprints."""


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    """Print a table on stdout: with lines on a terminal, as aligned columns elsewhere; numbers to the right.

    Args:
        header: the name of each column.
        rows: the cells of each row.
        title: the line above the table.
    """
    console = Console()
    numeric = [all(row[number][:1] in "+-0123456789" for row in rows) for number in range(len(header))]
    if console.is_terminal:
        table = Table(box=SIMPLE_HEAD, title=title or None, title_justify="left", title_style="bold", pad_edge=False)
        for number, name in enumerate(header):
            table.add_column(name, justify="right" if numeric[number] else "left", overflow="fold")
        for row in rows:
            table.add_row(*row)
        console.print(table, markup=False, highlight=False)
        return
    widths = [max(len(row[number]) for row in [header, *rows]) for number in range(len(header))]
    if title:
        typer.echo(title)
    for row in [header, *rows]:
        columns = zip(row, widths, numeric, strict=True)
        cells = [cell.rjust(width) if right else cell.ljust(width) for cell, width, right in columns]
        typer.echo("  ".join(cells).rstrip())


def print_rows(rows: Sequence[Row], baseline: str | None) -> None:
    """Print a table for each stream: accuracy, forgetting and learned accuracy, mean and std over seeds."""
    for stream in dict.fromkeys(row.setting.stream for row in rows):
        table = [row for row in rows if row.setting.stream == stream]
        several_lrs = len({row.setting.lr for row in table}) > 1
        optional = [name for name in OPTIONAL_COLUMNS if len(_values(table, name)) > 1]
        columns = [*(["lr"] if several_lrs else []), *optional]
        versus = [f"vs {baseline} [95 %]"] if baseline else []
        header = ["method", *columns, "accuracy %", "forgetting", "learned", *versus, "verdict"]
        cells = []
        for row in table:
            metrics = [_cell(row.metrics.get(name)) for name in ("accuracy", "forgetting", "learned")]
            lr = [f"{row.setting.lr:g}"] if several_lrs else []
            settings = [_setting(row, name) for name in optional]
            difference = [_difference(row.difference)] if baseline else []
            cells.append([row.label, *lr, *settings, *metrics, *difference, row.verdict])
        seeds = sorted({len(row.results) for row in table})
        count = pluralize(seeds[0], "seed") if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]} seeds"
        setting = table[0].setting
        training = f"{setting.network}, {pluralize(setting.epochs, 'epoch')}, batch {setting.batch}"
        common_lr = "" if several_lrs else f", lr {setting.lr:g}"
        print_table(header, cells, f"{stream}: {training}{common_lr}; mean ± std over {count}")


def print_choices(choices: Sequence[Choice]) -> None:
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
                    choice.method,
                    f"{setting.lr:g}" if setting else "none",
                    f"{setting.strength:g}" if setting and setting.strength is not None else "",
                    _cell(best.metrics.get("accuracy")) if best else "",
                    *([str(len(choice.as_good) or "")] if ties else []),
                    str(len(choice.grid)),
                    str(len(dropped)),
                    f"{dropped[0].label}: {dropped[0].unfinished[0].reason}" if dropped else "",
                ]
            )
        print_table([*header, "first reason"], rows, f"searched {stream}")


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


def _difference(value: Interval | None) -> str:
    if value is None:
        return ""
    return f"{value.mean:+.2f}" if value.count < 2 else f"{value.mean:+.2f} [{value.low:+.2f}, {value.high:+.2f}]"
