"""Accuracy against forgetting, all methods in one panel."""

from collections.abc import Iterable

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from mooring.report.families import Family
from mooring.report.figures.labels import place_labels
from mooring.report.numbers import shortened
from mooring.report.picture import Drawing
from mooring.report.section import Entry, Section
from mooring.report.style import FAINT, INK, WIDTH, add_legend

LEFT, RIGHT, TOP, BOTTOM = 0.55, 0.1, 0.35, 0.45
FONT_SIZE = 7.0


def draw(section: Section) -> Drawing | None:
    """Draw the best setting of each method with a label, and its other settings small, joined by strength."""
    shown = [entry for entry in section.shown if _point(entry) is not None]
    if not shown:
        return None
    height = min(4.0 + 0.08 * len(shown), 6.5)
    figure, panel, size = wide_panel(height)
    _paths(panel, section, shown)
    for entry in shown:
        x, y, colour = entry.row.metrics["forgetting"], entry.row.metrics["accuracy"], entry.family.colour
        if y.count > 1:
            panel.errorbar(x.mean, y.mean, y.std, x.std, fmt="none", ecolor=colour, elinewidth=0.8, alpha=0.55)
        panel.plot(x.mean, y.mean, entry.family.marker, color=colour, ms=5.5, mew=0, zorder=4)
    panel.set_xlabel("average forgetting, percentage points (less is better)")
    panel.set_ylabel("average accuracy, % (more is better)")
    _labels(panel, section, shown, size)
    add_legend(figure, family_marks(section.families))
    several = len(section.shown) < len(section.entries)
    return Drawing(
        "tradeoff",
        "Accuracy against forgetting",
        "Up and to the left is better. Bars are one standard deviation over seeds."
        + (" Each method is labelled at its best setting; faint points are its other settings." if several else "")
        + " Settings that no seed finished are not shown.",
        f"Scatter plot of average accuracy against average forgetting for {len(shown)} methods.",
        figure,
    )


def wide_panel(height: float) -> tuple[Figure, Axes, tuple[float, float]]:
    """Return a figure of this height in inches, its only panel, and the size of the panel in points."""
    figure = Figure(figsize=(WIDTH, height))
    inner = (WIDTH - LEFT - RIGHT, height - TOP - BOTTOM)
    panel = figure.add_axes((LEFT / WIDTH, BOTTOM / height, inner[0] / WIDTH, inner[1] / height))
    panel.grid()
    return figure, panel, (inner[0] * 72, inner[1] * 72)


def family_marks(families: Iterable[Family]) -> list[tuple[Line2D, str]]:
    """Return the entries of a legend of families."""
    return [(Line2D([], [], ls="", marker=f.marker, color=f.colour, ms=5.5, mew=0), f.name) for f in families]


def _point(entry: Entry) -> tuple[float, float] | None:
    """Return forgetting and accuracy, or None if one is missing."""
    metrics = [entry.row.metrics[name].mean for name in ("forgetting", "accuracy") if name in entry.row.metrics]
    return (metrics[0], metrics[1]) if len(metrics) == 2 and np.isfinite(metrics).all() else None


def _paths(panel: Axes, section: Section, shown: list[Entry]) -> None:
    """Join the settings of each method in the order of strength, then learning rate."""
    for best in shown:
        rivals = (entry for entry in section.entries if entry.contender == best.contender)
        settings = [entry for entry in rivals if _point(entry) is not None]
        if len(settings) > 1:
            settings.sort(key=lambda entry: (entry.row.setting.strength or 0.0, entry.row.setting.lr))
            x, y = zip(*map(_point, settings), strict=True)
            style = f"{best.family.marker}-"
            panel.plot(x, y, style, color=best.family.colour, ms=2.5, mew=0, lw=0.7, alpha=0.35, zorder=2)


def _labels(panel: Axes, section: Section, shown: list[Entry], size: tuple[float, float]) -> None:
    """Label each point, with a line to the label if it is far away."""
    (left, right), (low, high) = panel.get_xlim(), panel.get_ylim()
    panel.set(xlim=(left, right), ylim=(low, high))
    corner, scale = np.array([left, low]), np.array([right - left, high - low]) / np.array(size)
    points = (np.array([_point(entry) for entry in shown], dtype=np.float64) - corner) / scale
    names = [shortened(section.name(entry), 32) for entry in shown]
    widths = [0.6 * FONT_SIZE * len(name) for name in names]
    middles = place_labels(points, widths, 1.25 * FONT_SIZE, size)
    for name, point, middle, width in zip(names, points, middles, widths, strict=True):
        half = np.array([width, FONT_SIZE]) / 2
        nearest = np.clip(point, middle - half, middle + half)
        # Aligned at the side of the point: the widths are estimates, and fonts differ.
        side = int(np.sign(point[0] - middle[0])) if abs(point[0] - middle[0]) >= width / 2 else 0
        x, y = corner + (middle + half * (side, 0)) * scale
        align = {-1: "left", 0: "center", 1: "right"}[side]
        panel.text(x, y, name, size=FONT_SIZE, ha=align, va="center_baseline", color=INK, zorder=5)
        if np.hypot(*(nearest - point)) > 8:
            ends = corner + np.array([point, nearest]) * scale
            panel.plot(ends[:, 0], ends[:, 1], color=FAINT, lw=0.5, alpha=0.7, zorder=1)
