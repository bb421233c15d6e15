"""Tables for a terminal, and plain text elsewhere."""

import json
import math
from collections.abc import Sequence
from typing import Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from mooring.lab.model.metrics import Interval
from mooring.lab.model.plurals import pluralize
from mooring.lab.model.summary import Row
from mooring.lab.study.protocol import Choice

APART = ("network", "epochs", "batch", "momentum", "weight_decay", "heads", "init", "dtype")
"""Settings that are shown where they differ within a table."""

__all__ = ["as_json", "print_choices", "print_rows", "print_table"]


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    """A table on stdout: drawn on a terminal, aligned columns elsewhere; numbers to the right.

    Args:
        header: of each column.
        rows: cells.
        title: above it.
    """
    console = Console()
    right = [all(row[number][:1] in "+-0123456789" for row in rows) for number in range(len(header))]
    if console.is_terminal:
        table = Table(box=SIMPLE_HEAD, title=title or None, title_justify="left", title_style="bold", pad_edge=False)
        for number, name in enumerate(header):
            table.add_column(name, justify="right" if right[number] else "left", overflow="fold")
        for row in rows:
            table.add_row(*row)
        console.print(table, markup=False, highlight=False)
        return
    widths = [max(len(row[number]) for row in [header, *rows]) for number in range(len(header))]
    if title:
        typer.echo(title)
    for row in [header, *rows]:
        told = zip(row, widths, right, strict=True)
        cells = [cell.rjust(width) if numbers else cell.ljust(width) for cell, width, numbers in told]
        typer.echo("  ".join(cells).rstrip())


def print_rows(rows: Sequence[Row], baseline: str | None) -> None:
    """A table for each stream: accuracy, forgetting and what was learned, with std over seeds."""
    for stream in dict.fromkeys(row.setting.stream for row in rows):
        mine = [row for row in rows if row.setting.stream == stream]
        compared = [f"vs {baseline} [95 %]"] if baseline else []
        several = len({row.setting.lr for row in mine}) > 1
        differ = [name for name in APART if len({getattr(row.setting, name) for row in mine}) > 1]
        extra = [*(["lr"] if several else []), *differ]
        header = ["method", *extra, "accuracy %", "forgetting", "learned", *compared, "verdict"]
        cells = []
        for row in mine:
            told = [_cell(row.metrics.get(name)) for name in ("accuracy", "forgetting", "learned")]
            lr = [f"{row.setting.lr:g}"] if several else []
            apart = [str(getattr(row.setting, name))[:24] or "random" for name in differ]
            against = [_difference(row.difference)] if baseline else []
            cells.append([row.label, *lr, *apart, *told, *against, row.verdict])
        seeds = sorted({len(row.results) for row in mine})
        count = pluralize(seeds[0], "seed") if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]} seeds"
        setting = mine[0].setting
        trained = f"{setting.network}, {pluralize(setting.epochs, 'epoch')}, batch {setting.batch}"
        rate = "" if several else f", lr {setting.lr:g}"
        print_table(header, cells, f"{stream}: {trained}{rate}; mean ± std over {count}")


def print_choices(choices: Sequence[Choice]) -> None:
    """What a grid search chose, how many others were as good, if any, and what it dropped and why."""
    ties = any(choice.as_good for choice in choices)
    others = ["as good"] if ties else []
    header = ("method", "lr", "strength", "accuracy %", *others, "tried", "dropped", "first reason")
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
        print_table(header, rows, f"searched {stream}")


def as_json(told: Any) -> str:
    """JSON that any program reads: numbers that JSON has no word for become null.

    Example:
        >>> as_json([float("nan")]).split()
        ['[', 'null', ']']
    """
    return json.dumps(_plain(told), indent=1)


def _plain(told: Any) -> Any:
    if isinstance(told, float):
        return told if math.isfinite(told) else None
    if isinstance(told, dict):
        return {name: _plain(value) for name, value in told.items()}
    return [_plain(value) for value in told] if isinstance(told, list | tuple) else told


def _cell(value: Interval | None) -> str:
    return "" if value is None else str(value)


def _difference(value: Interval | None) -> str:
    if value is None:
        return ""
    return f"{value.mean:+.2f}" if value.count < 2 else f"{value.mean:+.2f} [{value.low:+.2f}, {value.high:+.2f}]"
