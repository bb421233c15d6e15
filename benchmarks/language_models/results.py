"""The table of results: means over seeds of each method at each dial."""

import json
import math
import statistics
from typing import Any

from run_log import Row, half_width

COLUMNS = {
    "kl": ("kl", "{:.4f}"),
    "rise": ("rise", "{:+.3f}"),
    "loss": ("loss", "{:.4f}"),
    "learned": ("learned %", "{:.1f}"),
    "accuracy": ("accuracy", "{:.1f}"),
    "gauge": ("gauge", "{:.4f}"),
    "seconds": ("seconds", "{:.0f}"),
    "train_seconds": ("of steps", "{:.0f}"),
    "gib": ("GiB", "{:.1f}"),
}
"""What the table shows: its head, and how numbers are written."""

INTERVALS = ("kl", "loss", "learned")
"""Columns that are followed by half of their 95 % interval."""

BASELINES = {"lora": "lora"}
"""What a method's learning is compared with, by the first part of its name; otherwise plain fine-tuning."""


def fall(row: Row) -> float:
    """Return by how much the loss of the new task fell."""
    return float(row["loss_before"] - row["loss"])


def baseline_falls(rows: list[Row]) -> dict[str, float]:
    """Return the mean fall of plain fine-tuning of all weights, and of adapters, at the dial where it learns most."""
    falls = {}
    for name in ("plain", "lora"):
        dials: dict[float, list[float]] = {}
        for row in rows:
            if row["method"] == name:
                dials.setdefault(row["dial"], []).append(fall(row))
        falls[name] = max(map(statistics.fmean, dials.values()), default=math.nan)
    return falls


def summarize(rows: list[Row]) -> list[Row]:
    """Return the mean over seeds of each method at each dial, with half-widths of 95 % intervals."""
    rows = [row for row in rows if not row.get("diverged")]
    falls = baseline_falls(rows)
    groups: dict[tuple[str, float], list[Row]] = {}
    for row in rows:
        usual = falls[BASELINES.get(row["method"].partition("-")[0], "plain")]
        derived = {"rise": row["chat_loss"] - row["chat_loss_before"], "learned": 100 * fall(row) / usual}
        groups.setdefault((row["method"], row["dial"]), []).append({**row, **derived})
    table = []
    for (method, dial), members in groups.items():
        summary: Row = {"method": method, "dial": dial, "seeds": len(members)}
        for name in COLUMNS:
            values = [row[name] for row in members if row.get(name) is not None]
            summary[name] = statistics.fmean(values) if values else math.nan
            summary[f"{name}_error"] = half_width(values)
        summary["returned"] = sum(bool(row.get("returned")) for row in members)
        table.append(summary)
    return table


def cells(summary: Row) -> list[str]:
    """Return the cells of a method at a dial, with intervals where there are three seeds."""
    line = [summary["method"], f"{summary['dial']:g}", str(summary["seeds"])]
    for name, (_, form) in COLUMNS.items():
        value, error = summary[name], summary[f"{name}_error"]
        text = "" if math.isnan(value) else form.format(value)
        if text and name in INTERVALS and summary["seeds"] > 2:
            text += f" ± {form.format(error)}"
        line.append(text)
    return line


def print_table(rows: list[Row]) -> None:
    """Print the settings, and the means of all methods as a table in Markdown, by the methods' names."""
    for settings in sorted({json.dumps(row.get("settings", {})) for row in rows}):
        print(", ".join(f"{name} {value}" for name, value in json.loads(settings).items()))
    if rows:
        shown = {name: rows[-1].get(name) for name in ("loss_before", "accuracy_before", "chat_loss_before")}
        print(", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in shown.items() if value is not None))
    heads: list[Any] = ["method", "dial", "seeds", *(head for head, _ in COLUMNS.values())]
    table = summarize(rows)
    for line in (heads, ["---"] * len(heads), *map(cells, table)):
        print(f"| {' | '.join(line)} |")
    for summary in table:
        if summary["returned"]:
            print(f"gave up a part: {summary['method']} at {summary['dial']:g}, {summary['returned']} runs")
    for row in rows:
        if row.get("diverged"):
            print(f"diverged: {row['method']} at {row['dial']:g}, seed {row['seed']}")
