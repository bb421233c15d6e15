"""Importance, similarity to the model after the first task (CKA), and drift, by layer."""

from collections.abc import Sequence

import numpy as np

from mooring_lab.report.logarithm import logarithm, ticks
from mooring_lab.report.numbers import printable, shortened
from mooring_lab.report.panel_grid import Margins, PanelGrid, add_panels
from mooring_lab.report.picture import Drawing
from mooring_lab.report.section import Array, Entry, Section, mean_over_seeds

LETTERS, LETTER, KEY, LINE = 26, 0.0555, 0.25, 0.125
"""The longest name in the legend beside a panel; in inches, a letter, the line before a name, and the line's height."""

STYLES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
"""Lines of a family share its colour; style and marker tell them apart, and are the same in every panel."""

MAX_LAYER_NAMES = 16
"""With more layers, only some of them are named."""

MEASURES = {
    "importance": (
        "Importance by layer",
        "mean importance",
        "Mean importance of the parameters of each layer for the previous tasks, at the end; mean over seeds, "
        "logarithmic scale. Importances of different methods have different scales: compare shapes.",
    ),
    "cka": (
        "Similarity to the model after the first task, by layer",
        "CKA",
        "Debiased linear CKA between the representations of the final model and of the model after the first task; "
        "1 if the representation did not change. Mean over seeds.",
    ),
    "drift": (
        "Parameter drift by layer",
        "relative drift",
        "Distance that the parameters of each layer moved after the first task, relative to their norm then. Mean over "
        "seeds.",
    ),
}
"""Title, label of the axis and caption of each measure."""


def draw(section: Section, measure: str) -> Drawing | None:
    """Draw a measure by layer; importance is on a logarithmic scale."""
    title, ylabel, caption = MEASURES[measure]
    layers, values = _collect(section, measure)
    if measure == "importance":
        omitted = sorted({entry.label for entry, y in values.items() if (y[np.isfinite(y)] <= 0).any()})
        caption += f" Layers at or below 0 are left out, as in {', '.join(omitted)}." if omitted else ""
        values = {entry: y for entry, means in values.items() if np.isfinite(y := logarithm(means)).any()}
    if not values:
        return None
    alt = f"Line charts by family: {ylabel} of {len(layers)} layers for {len(values)} methods."
    figure = _draw_families(section, layers, values, ylabel, log=measure == "importance").figure
    return Drawing(measure, title, caption, alt, figure)


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


def _draw_families(
    section: Section, layers: Sequence[str], lines: dict[Entry, Array], ylabel: str, log: bool
) -> PanelGrid:
    """Draw a panel for each family, with its legend beside it."""
    families = [family for family in section.families if any(entry.family == family for entry in lines)]
    groups = [[entry for entry in lines if entry.family == family] for family in families]
    strong = [entry for entry in lines if entry.row.setting.strength is not None]
    kinds = {kind: number for number, kind in enumerate(dict.fromkeys(map(_kind, strong)))}
    step = -(-len(layers) // MAX_LAYER_NAMES)
    names = [shortened(printable(layer), 20) if number % step == 0 else "" for number, layer in enumerate(layers)]
    legend_width = KEY + LETTER * LETTERS
    margins = Margins(
        0.68,
        legend_width,
        top=0.4,
        bottom=0.25 + 0.055 * max(map(len, names)),
        across=0.68 + legend_width,
        between=0.44,
    )
    height = max(1.5, LINE * max(map(len, groups)))
    grid = add_panels(len(families), 2, lambda width: height, margins, xticks=[])
    finite = np.concatenate([values[np.isfinite(values)] for values in lines.values()])
    low, high = float(finite.min()), float(finite.max())
    margin = 0.05 * (high - low) or 0.05
    for number, (panel, family, group) in enumerate(zip(grid.axes, families, groups, strict=True)):
        panel.set(xlim=(-0.3, len(names) - 0.7), ylim=(low - margin, high + margin))
        panel.set_title(family.name, loc="left", pad=6)
        if number % 2 == 0:
            panel.set_ylabel(ylabel)
        if log:
            panel.set_yticks(list(levels := ticks(low, high)), list(levels.values()))
        panel.grid(axis="y")
        if number >= len(families) - 2:
            panel.set_xticks(range(len(names)), names, rotation=90)
        for place, entry in enumerate(group):
            kind = kinds.get(_kind(entry), place)
            x = np.flatnonzero(np.isfinite(lines[entry]))
            style, marker = STYLES[kind % len(STYLES)], MARKERS[kind % len(MARKERS)]
            name = shortened(section.name(entry), LETTERS)
            panel.plot(x, lines[entry][x], style, marker=marker, ms=2.8, mew=0, color=family.colour, label=name)
        spacing = {"labelspacing": 0.3, "borderpad": 0, "handlelength": 1.6, "handletextpad": 0.4}
        panel.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=6.5, **spacing)
    return grid


def _kind(entry: Entry) -> str:
    """Return the importance of a method: it has the same line style in every panel."""
    return entry.method.removeprefix(f"{entry.family.name}-")
