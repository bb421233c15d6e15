"""The rows of results: means over seeds, the table, and the figure."""

import json
import math
import statistics
from pathlib import Path

from run_log import Row, half_width
from upper_hull import hull

COLUMNS = ("before", "kept", "new", "nats", "rise", "new_loss", "gauge", "seconds", "gib")


def summarize(rows: list[Row]) -> list[Row]:
    """Return the mean over seeds of each method at each dial, with half-widths of 95 % intervals."""
    groups: dict[tuple[str, float], list[Row]] = {}
    for row in rows:
        if not row.get("diverged"):
            groups.setdefault((row["method"], row["dial"]), []).append(row)
    table = []
    for (method, dial), members in groups.items():
        summary: Row = {"method": method, "dial": dial, "seeds": len(members)}
        for name in COLUMNS:
            values = [row[name] for row in members if row[name] is not None]
            summary[name] = statistics.fmean(values) if values else math.nan
            summary[f"{name}_error"] = half_width(values)
        summary["highest_gauge"] = max((row["gauge"] for row in members if row["gauge"] is not None), default=math.nan)
        table.append(summary)
    return table


def print_table(rows: list[Row]) -> None:
    """Print the settings, and the means of all methods."""
    for settings in sorted({json.dumps(row.get("settings", {})) for row in rows}):
        print(", ".join(f"{name} {value}" for name, value in json.loads(settings).items()))
    names = {"dial": "dial", "seeds": "seeds", "before": "before", "kept": "kept", "kept_error": "+-"}
    names |= {"new": "new", "new_error": "+-", "nats": "nats", "rise": "rise", "new_loss": "new loss"}
    names |= {"gauge": "gauge", "highest_gauge": "highest", "seconds": "seconds", "gib": "GiB"}
    print("method".ljust(28) + "".join(head.rjust(9) for head in names.values()))
    for row in summarize(rows):
        print(row["method"].ljust(28) + "".join(f"{row[name]:9.3g}" for name in names))
    for row in rows:
        if row.get("diverged"):
            print(f"diverged: {row['method']} at {row['dial']:g}, seed {row['seed']}")


def draw(rows: list[Row], path: Path) -> None:
    """Draw what was learned over what was kept, with the hull of the other methods, as .svg and .png."""
    from matplotlib.figure import Figure

    from mooring.report.style import FAINT, LINES, figure_style

    table = summarize(rows)
    with figure_style():
        figure = Figure(figsize=(7.2, 4.8))
        axes = figure.add_subplot()
        methods = list(dict.fromkeys(row["method"] for row in table))
        for number, method in enumerate(methods):
            own = sorted((row for row in table if row["method"] == method), key=lambda row: row["dial"])
            style: Row = {"color": LINES[number % len(LINES)], "marker": "o" if method.startswith("budget") else "x"}
            axes.plot([row["kept"] for row in own], [row["new"] for row in own], label=method, lw=1, ms=5, **style)
        border = hull([(row["kept"], row["new"]) for row in table if not row["method"].startswith("budget")])
        if border:
            axes.plot(*zip(*border, strict=True), color=FAINT, lw=0.8, ls=(0, (4, 2)), label="hull of the others")
        axes.set_xlabel("kept, %")
        axes.set_ylabel("new task, %")
        axes.legend(fontsize=7, ncol=2)
        for kind in ("svg", "png"):
            metadata = {"Date": None} if kind == "svg" else {"Software": None}
            figure.savefig(path.with_suffix(f".{kind}"), format=kind, dpi=150, metadata=metadata)
