"""The rows of results: means over seeds, the table, and the figure."""

import json
import math
import statistics
from pathlib import Path
from typing import Any

from run_log import Row, half_width
from upper_hull import upper_right

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


NAMES = {
    "plain": "plain fine-tuning",
    "linear-probe": "linear probe",
    "budget": "Mooring, budget in nats",
    "budget-new-inputs": "Mooring, new inputs",
    "lp-ft": "LP-FT",
    "wise-ft": "WiSE-FT",
    "lora": "LoRA",
    "l2-sp": "L2-SP",
    "ewc": "EWC",
}
"""What the figure calls methods whose own name does not say it."""

LABELS = {"budget": "{:g}", "plain": "rate x {:g}"}
"""What the figure writes beside the points of a method."""


AXES = {
    "cifar100": ("ImageNet accuracy that is kept", "CIFAR-100 accuracy"),
    "flowers102": ("ImageNet accuracy that is kept", "Flowers-102 accuracy"),
    "folder": ("ImageNet accuracy that is kept", "accuracy on the new images"),
    "gpt": ("accuracy on code, which it knew", "accuracy on prose, which it learns"),
    "gpt-lora": ("accuracy on code, which it knew", "accuracy on prose, which it learns"),
}
"""What the axes of a task show."""


ZOOM_BOX = 0.49, 0.15, 0.38, 0.4
"""Left, bottom, width and height of the enlarged part, as fractions of the figure's axes."""


def draw(rows: list[Row], path: Path, *, zoom: bool = False) -> None:
    """Draw what was learned over what was kept, with intervals and the hull of the other methods, as .svg and .png.

    Args:
        rows: the rows of one task.
        path: the files, without their endings.
        zoom: whether to enlarge the part around Mooring's points in empty space.
    """
    from matplotlib.figure import Figure

    from mooring_lab.report.style import FAINT, figure_style

    table = summarize(rows)
    task = rows[0].get("settings", {}).get("task", "") if rows else ""
    ours = [row for row in table if row["method"] == "budget"]
    with figure_style():
        figure = Figure(figsize=(7.2, 4.4))
        axes = figure.add_subplot()
        enlarged = {"budget"} if zoom else set()
        _draw_points(axes, table, {name: text for name, text in LABELS.items() if name not in enlarged})
        if zoom and ours:
            detail = axes.inset_axes(ZOOM_BOX)
            _draw_points(detail, table, {name: LABELS[name] for name in enlarged}, thickness=0.7)
            kept, new = ([row[name] for row in ours] for name in ("kept", "new"))
            detail.set(xlim=(min(kept) - 1.5, max(kept) + 1.5), ylim=(min(new) - 2.5, max(new) + 1.5))
            detail.tick_params(labelsize=7)
            axes.indicate_inset_zoom(detail, edgecolor=FAINT, lw=0.6)
        known, learned = AXES.get(task, ("kept", "new task"))
        axes.set_xlabel(f"{known}, %")
        axes.set_ylabel(f"{learned}, %")
        place = {"loc": "upper left", "bbox_to_anchor": (0, -0.14), "ncols": 3} if zoom else {}
        axes.legend(fontsize=8, title="method (seeds)", title_fontsize=8, **place)
        for kind in ("svg", "png"):
            metadata = {"Date": None} if kind == "svg" else {"Software": None}
            figure.savefig(path.with_suffix(f".{kind}"), format=kind, dpi=150, metadata=metadata, bbox_inches="tight")


def _draw_points(axes: Any, table: list[Row], labels: dict[str, str], thickness: float = 1.0) -> None:
    """Draw each method's points in the order of its dial, the labels of some, and the hull of the other methods."""
    from mooring_lab.report.style import FAINT, LINES

    methods = dict.fromkeys(row["method"] for row in table)
    for number, method in enumerate(sorted(methods, key=lambda method: not method.startswith("budget"))):
        own = sorted((row for row in table if row["method"] == method), key=lambda row: row["dial"])
        moored = method.startswith("budget")
        errors = [[row[f"{name}_error"] if row["seeds"] > 2 else 0 for row in own] for name in ("kept", "new")]
        axes.errorbar(
            [row["kept"] for row in own],
            [row["new"] for row in own],
            xerr=errors[0],
            yerr=errors[1],
            label=f"{NAMES.get(method, method)} ({max(row['seeds'] for row in own)})",
            color=LINES[number % len(LINES)],
            lw=thickness,
            ls="-" if number < len(LINES) else ":",
            capsize=2,
            marker="o" if moored else "D" if number < len(LINES) else "s",
            ms=(8 if moored else 6) * thickness,
            zorder=3 if moored else 2,
        )
        for row in own if method in labels else ():
            axes.annotate(
                labels[method].format(row["dial"]),
                (row["kept"], row["new"]),
                (-6, 6) if moored else (6, 5),
                textcoords="offset points",
                ha="right" if moored else "left",
                size=8,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.8},
                zorder=4,
                annotation_clip=True,
            )
    border = upper_right([(row["kept"], row["new"]) for row in table if not row["method"].startswith("budget")])
    if len(border) > 1:
        axes.plot(*zip(*border, strict=True), color=FAINT, lw=0.8, ls=(0, (4, 2)), label="hull of the others")
