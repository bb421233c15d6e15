"""Accuracy against forgetting of all methods."""

from collections.abc import Iterable

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.lines import Line2D

from mooring_lab.report.families import Family
from mooring_lab.report.figures.closer_look import limits, scatter
from mooring_lab.report.numbers import shortened
from mooring_lab.report.picture import Drawing
from mooring_lab.report.section import Array, Entry, Section
from mooring_lab.report.style import WIDE, FigureLayout, add_legend


def draw(section: Section, layout: FigureLayout = WIDE) -> Drawing | None:
    """Draw the best setting of each method with a label, and its other settings small, joined by strength."""
    shown = [entry for entry in section.shown if _point(entry) is not None]
    if not shown:
        return None
    shown.sort(key=lambda entry: -entry.accuracy)
    points = np.array([_point(entry) for entry in shown], dtype=np.float64)
    names = [shortened(section.name(entry), 32) for entry in shown]
    marks = family_marks(section.families)

    def draw_points(panel: Axes, box: Array) -> None:
        _draw_points(panel, section, shown)

    height = 4.0 + 0.04 * len(shown)
    figure, note = scatter(points, names, limits(points), draw_points, layout, height, len(marks))
    add_legend(figure, marks, layout)
    several = len(section.shown) < len(section.entries)
    return Drawing(
        "tradeoff",
        "Accuracy against forgetting",
        "Up and to the left is better. Bars are one standard deviation over seeds, within 0 to 100 %."
        + (" Each method is labelled at its most accurate setting; faint points are its other settings." * several)
        + f"{note} Settings that no seed finished are not shown.",
        f"Scatter plot of average accuracy against forgetting (T) for {len(shown)} methods.",
        figure,
    )


def family_marks(families: Iterable[Family]) -> list[tuple[Line2D, str]]:
    """Return the entries of a legend of families."""
    return [(Line2D([], [], ls="", marker=f.marker, color=f.colour, ms=5.5, mew=0), f.name) for f in families]


def _point(entry: Entry) -> tuple[float, float] | None:
    """Return forgetting and accuracy, or None if one is missing."""
    metrics = [entry.row.metrics[name].mean for name in ("forgetting", "accuracy") if name in entry.row.metrics]
    return (metrics[0], metrics[1]) if len(metrics) == 2 and np.isfinite(metrics).all() else None


def _draw_points(panel: Axes, section: Section, shown: list[Entry]) -> None:
    """Draw every method with its bars, and its other settings."""
    _paths(panel, section, shown)
    bars, colours = [], []
    for entry in shown:
        x, y, colour = entry.row.metrics["forgetting"], entry.row.metrics["accuracy"], entry.family.colour
        if y.count > 1:
            (left, right), (low, high) = ((max(m.mean - m.std, 0), min(m.mean + m.std, 100)) for m in (x, y))
            bars += [[(left, y.mean), (right, y.mean)], [(x.mean, low), (x.mean, high)]]
            colours += [colour, colour]
        panel.plot(x.mean, y.mean, entry.family.marker, color=colour, ms=5.5, mew=0, zorder=4)
    panel.add_collection(LineCollection(bars, colors=colours, lw=0.8, alpha=0.4, zorder=2), autolim=False)
    panel.set_xlabel("forgetting (T), points (less is better)")
    panel.set_ylabel("average accuracy, % (more is better)")


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
