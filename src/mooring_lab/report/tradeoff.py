"""Accuracy against forgetting of all methods."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.lines import Line2D

from mooring_lab.report.closer_look import limits, scatter
from mooring_lab.report.families import FAMILIES, point_styles
from mooring_lab.report.numbers import shortened
from mooring_lab.report.picture import Drawing
from mooring_lab.report.section import Array, Entry, Section
from mooring_lab.report.style import MAX_LETTERS


def draw(section: Section) -> Drawing | None:
    """Draw the best setting of each method, and its other settings small, joined by strength."""
    shown = [entry for entry in section.shown if _point(entry) is not None]
    if not shown:
        return None
    shown.sort(key=lambda entry: -entry.accuracy)
    points = np.array([_point(entry) for entry in shown], dtype=np.float64)
    by_family = sorted(shown, key=lambda entry: FAMILIES.index(entry.family))
    styles = dict(zip(by_family, point_styles(entry.row.setting.method for entry in by_family), strict=True))
    names = [shortened(section.name(entry), MAX_LETTERS) for entry in by_family]
    marks = [(Line2D([], [], ls="", ms=5.5, **styles[e]), name) for e, name in zip(by_family, names, strict=True)]

    def draw_points(panel: Axes, box: Array) -> None:
        _draw_points(panel, section, styles)

    height = 4.0 + 0.04 * len(shown)
    figure, note = scatter(points, limits(points), draw_points, height, marks)
    several = len(section.shown) < len(section.entries)
    return Drawing(
        "tradeoff",
        "Accuracy against forgetting",
        "Up and to the left is better. Bars are one standard deviation over seeds, within 0 to 100 %."
        + (" Large points are the most accurate settings; faint ones are the others of the same method." * several)
        + f"{note} Settings that no seed finished are not shown.",
        f"Scatter plot of average accuracy against forgetting (T) for {len(shown)} methods.",
        figure,
    )


def _point(entry: Entry) -> tuple[float, float] | None:
    """Return forgetting and accuracy, or None if one is missing."""
    metrics = [entry.row.metrics[name].mean for name in ("forgetting", "accuracy") if name in entry.row.metrics]
    return (metrics[0], metrics[1]) if len(metrics) == 2 and np.isfinite(metrics).all() else None


def _draw_points(panel: Axes, section: Section, styles: Mapping[Entry, dict[str, Any]]) -> None:
    """Draw every method with its bars, and its other settings."""
    _paths(panel, section, styles)
    bars, colours = [], []
    for entry, style in styles.items():
        x, y, colour = entry.row.metrics["forgetting"], entry.row.metrics["accuracy"], entry.family.colour
        if y.count > 1:
            (left, right), (low, high) = ((max(m.mean - m.std, 0), min(m.mean + m.std, 100)) for m in (x, y))
            bars += [[(left, y.mean), (right, y.mean)], [(x.mean, low), (x.mean, high)]]
            colours += [colour, colour]
        panel.plot(x.mean, y.mean, ms=5.5, zorder=4, **style)
    panel.add_collection(LineCollection(bars, colors=colours, lw=0.8, alpha=0.4, zorder=2), autolim=False)
    panel.set_xlabel("forgetting (T), points (less is better)")
    panel.set_ylabel("average accuracy, % (more is better)")


def _paths(panel: Axes, section: Section, styles: Mapping[Entry, dict[str, Any]]) -> None:
    """Join the settings of each method in the order of strength, then learning rate."""
    for best, style in styles.items():
        rivals = (entry for entry in section.entries if entry.contender == best.contender)
        settings = [entry for entry in rivals if _point(entry) is not None]
        if len(settings) > 1:
            settings.sort(key=lambda entry: (entry.row.setting.strength or 0.0, entry.row.setting.lr))
            x, y = zip(*map(_point, settings), strict=True)
            panel.plot(x, y, ms=2.5, lw=0.7, alpha=0.35, zorder=2, **style)
