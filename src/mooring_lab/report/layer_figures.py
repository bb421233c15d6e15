"""Importance, similarity to the model after the first task (CKA), and drift, by layer."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from mooring_lab.report.logarithm import logarithm, ticks
from mooring_lab.report.numbers import printable, shortened
from mooring_lab.report.picture import Drawing
from mooring_lab.report.section import Array, Entry, Section, mean_over_seeds
from mooring_lab.report.style import NARROW, WIDE, FigureLayout

LEFT, TOP, GAP, LINE = 0.68, 0.4, 0.34, 0.125
"""In inches: left and top margin, gap between rows, height of a line of the legend."""

LETTERS, LETTER, KEY = {WIDE: 26, NARROW: 20}, 0.0555, 0.25
"""The longest name in the legend beside a panel, and the widths of a letter and of a line before it, in inches."""

STYLES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
"""Lines of a family share its colour; style and marker tell them apart, and are the same in every panel."""

MAX_LAYER_NAMES = 16
"""With more layers, only some of them are named."""


def draw_importance(section: Section, layout: FigureLayout = WIDE) -> Drawing | None:
    """Draw the mean importance by layer, on a logarithmic scale."""
    layers, measured = _collect(section, "importance")
    omitted = sorted({entry.label for entry, y in measured.items() if (y[np.isfinite(y)] <= 0).any()})
    logs = {entry: y for entry, values in measured.items() if np.isfinite(y := logarithm(values)).any()}
    if not logs:
        return None
    note = f" Layers at or below 0 are left out, as in {', '.join(omitted)}." if omitted else ""
    return Drawing(
        "importance",
        "Importance by layer",
        "Mean importance of the parameters of each layer for the previous tasks, at the end; mean over seeds, "
        f"logarithmic scale. Importances of different methods have different scales: compare shapes.{note}",
        f"Line charts by family: mean importance of {len(layers)} layers for {len(logs)} methods.",
        _draw(section, layout, layers, logs, "mean importance", log=True),
    )


def draw_cka(section: Section, layout: FigureLayout = WIDE) -> Drawing | None:
    """Draw the CKA by layer with the model after the first task."""
    caption = (
        "Debiased linear CKA between the representations of the final model and of the model after the first task; "
        "1 if the representation did not change. Mean over seeds."
    )
    return _draw_measure(
        section, layout, "cka", "Similarity to the model after the first task, by layer", caption, "CKA"
    )


def draw_drift(section: Section, layout: FigureLayout = WIDE) -> Drawing | None:
    """Draw the parameter drift by layer since the first task."""
    caption = (
        "Distance that the parameters of each layer moved after the first task, relative to their norm then. Mean over "
        "seeds."
    )
    return _draw_measure(section, layout, "drift", "Parameter drift by layer", caption, "relative drift")


def _draw_measure(
    section: Section, layout: FigureLayout, name: str, title: str, caption: str, ylabel: str
) -> Drawing | None:
    layers, values = _collect(section, name)
    if not values:
        return None
    alt = f"Line charts by family: {ylabel} of {len(layers)} layers for {len(values)} methods."
    return Drawing(name, title, caption, alt, _draw(section, layout, layers, values, ylabel))


def _collect(section: Section, measure: str) -> tuple[list[str], dict[Entry, Array]]:
    """Return means over seeds, layers in the order of their first appearance; no values if no run has the measure."""
    tables = {entry: [getattr(run, measure) for run in entry.row.results] for entry in section.shown}
    layers = list(dict.fromkeys(layer for runs in tables.values() for table in runs for layer in table))
    values = {}
    for entry, runs in tables.items():
        rows = [[table.get(layer, np.nan) for layer in layers] for table in runs]
        mean, _ = mean_over_seeds(np.array(rows, dtype=np.float64).reshape(len(rows), len(layers)))
        if np.isfinite(mean).any():
            values[entry] = mean
    return layers, values


def _draw(
    section: Section,
    layout: FigureLayout,
    layers: Sequence[str],
    lines: dict[Entry, Array],
    ylabel: str,
    log: bool = False,
) -> Figure:
    """Draw a panel for each family, with its legend beside it."""
    families = [family for family in section.families if any(entry.family == family for entry in lines)]
    groups = [[entry for entry in lines if entry.family == family] for family in families]
    strong = [entry for entry in lines if entry.row.setting.strength is not None]
    kinds = {kind: number for number, kind in enumerate(dict.fromkeys(map(_kind, strong)))}
    names = _names(layers)
    bottom = 0.25 + 0.055 * max(map(len, names))
    columns = 2 if layout is WIDE else 1
    rows = -(-len(families) // columns)
    height = max(1.5, LINE * max(map(len, groups)))
    width = layout.width / columns - LEFT - KEY - LETTER * LETTERS[layout]
    total = TOP + rows * height + (rows - 1) * (GAP + 0.1) + bottom
    figure = Figure(figsize=(layout.width, total))
    finite = np.concatenate([values[np.isfinite(values)] for values in lines.values()])
    low, high = float(finite.min()), float(finite.max())
    margin = 0.05 * (high - low) or 0.05
    for number, (family, group) in enumerate(zip(families, groups, strict=True)):
        row, column = divmod(number, columns)
        left, top = LEFT + column * layout.width / columns, TOP + row * (height + GAP + 0.1)
        box = (left / layout.width, 1 - (top + height) / total, width / layout.width, height / total)
        panel = figure.add_axes(box, xticks=[], xlim=(-0.3, len(names) - 0.7), ylim=(low - margin, high + margin))
        panel.set_title(family.name, loc="left", pad=6)
        if column == 0:
            panel.set_ylabel(ylabel)
        if log:
            panel.set_yticks(list(levels := ticks(low, high)), list(levels.values()))
        panel.grid(axis="y")
        if number >= len(families) - columns:
            panel.set_xticks(range(len(names)), names, rotation=90)
        places = [kinds.get(_kind(entry), place) for place, entry in enumerate(group)]
        for entry, place in zip(group, places, strict=True):
            x = np.flatnonzero(np.isfinite(lines[entry]))
            style, marker = STYLES[place % len(STYLES)], MARKERS[place % len(MARKERS)]
            name = shortened(section.name(entry), LETTERS[layout])
            panel.plot(x, lines[entry][x], style, marker=marker, ms=2.8, mew=0, color=family.colour, label=name)
        spacing = {"labelspacing": 0.3, "borderpad": 0, "handlelength": 1.6, "handletextpad": 0.4}
        panel.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=6.5, **spacing)
    return figure


def _kind(entry: Entry) -> str:
    """Return the importance of a method: it has the same line style in every panel."""
    return entry.method.removeprefix(f"{entry.family.name}-")


def _names(layers: Sequence[str]) -> list[str]:
    """Return the label of each layer; with many layers most labels are empty."""
    step = -(-len(layers) // MAX_LAYER_NAMES)
    return [shortened(printable(layer), 20) if number % step == 0 else "" for number, layer in enumerate(layers)]
