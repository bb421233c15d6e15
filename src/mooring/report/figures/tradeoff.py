"""Accuracy against forgetting: all methods in one panel, and the most accurate ones in another if they are crowded."""

from collections.abc import Iterable

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from mooring.report.families import Family
from mooring.report.figures.point_labels import label_points
from mooring.report.numbers import shortened
from mooring.report.picture import Drawing
from mooring.report.section import Array, Entry, Section
from mooring.report.style import FAINT, LEGEND_ROW, WIDE, FigureLayout, add_legend

LEFT, RIGHT, TOP, BOTTOM, GAP = 0.55, 0.1, 0.35 - LEGEND_ROW, 0.45, 0.62
"""In inches: the margins of the figure below its legend, and the gap between panels."""

FEW_METHODS, CROWDED_SHARE = 10, 0.25
"""With more methods, the better half gets a panel of its own if it fills less than this share of the first one."""


def draw(section: Section, layout: FigureLayout = WIDE) -> Drawing | None:
    """Draw the best setting of each method with a label, and its other settings small, joined by strength."""
    shown = [entry for entry in section.shown if _point(entry) is not None]
    if not shown:
        return None
    shown.sort(key=lambda entry: -entry.accuracy)
    points = np.array([_point(entry) for entry in shown], dtype=np.float64)
    boxes = [_limits(points)]
    if _crowded(closer := _limits(points[: -(-len(points) // 2)]), boxes[0], len(points)):
        boxes.append(closer)
    marks = family_marks(section.families)
    figure, panels, size = side_by_side(len(boxes), 4.0 + 0.04 * len(shown), layout, len(marks))
    names = [shortened(section.name(entry), 32) for entry in shown]
    without = 0
    for panel, box, inner in zip(panels, boxes, [*boxes[1:], None], strict=True):
        _draw_points(panel, section, shown, box)
        here = np.array([inner is None or not _inside(point, inner) for point in points])
        if inner is not None:
            (left, right), (low, high) = inner
            frame = Rectangle((left, low), right - left, high - low, fill=False, ec=FAINT, lw=0.7, zorder=4)
            panel.add_patch(frame)
        chosen = np.flatnonzero(here)
        without += label_points(panel, points[chosen], [names[index] for index in chosen], size)
    panels[-1].set_title("the frame on a larger scale" if len(boxes) > 1 else "", loc="left", size=7.5, color=FAINT)
    add_legend(figure, marks, layout)
    several = len(section.shown) < len(section.entries)
    return Drawing(
        "tradeoff",
        "Accuracy against forgetting",
        "Up and to the left is better. Bars are one standard deviation over seeds, within 0 to 100 %."
        + (" The second panel shows the frame of the first on a larger scale." if len(boxes) > 1 else "")
        + (" Each method is labelled at its most accurate setting; faint points are its other settings." * several)
        + (f" {without} points have no room for a label: the table has them." if without else "")
        + " Settings that no seed finished are not shown.",
        f"Scatter plot of average accuracy against average forgetting for {len(shown)} methods.",
        figure,
    )


def side_by_side(
    count: int, height: float, layout: FigureLayout, marks: int
) -> tuple[Figure, list[Axes], tuple[float, float]]:
    """Return a figure, its panels (beside each other, or stacked on a phone) and the size of one in points.

    Args:
        count: the number of panels.
        height: the height of a panel with its margins, in inches.
        layout: the shape of the figure.
        marks: the number of entries of its legend.
    """
    columns = count if layout is WIDE else 1
    rows = count // columns
    above = TOP + layout.legend_height(marks) + (LEGEND_ROW if count > 1 else 0.0)
    width = (layout.width - LEFT * columns - RIGHT - (GAP - LEFT) * (columns - 1)) / columns
    tall = height - TOP - BOTTOM
    total = above + rows * tall + (rows - 1) * GAP + BOTTOM
    figure = Figure(figsize=(layout.width, total))
    panels = []
    for number in range(count):
        row, column = divmod(number, columns)
        left, top = LEFT + column * (width + GAP), above + row * (tall + GAP)
        box = (left / layout.width, 1 - (top + tall) / total, width / layout.width, tall / total)
        panels.append(figure.add_axes(box))
        panels[-1].grid()
    return figure, panels, (width * 72, tall * 72)


def family_marks(families: Iterable[Family]) -> list[tuple[Line2D, str]]:
    """Return the entries of a legend of families."""
    return [(Line2D([], [], ls="", marker=f.marker, color=f.colour, ms=5.5, mew=0), f.name) for f in families]


def _point(entry: Entry) -> tuple[float, float] | None:
    """Return forgetting and accuracy, or None if one is missing."""
    metrics = [entry.row.metrics[name].mean for name in ("forgetting", "accuracy") if name in entry.row.metrics]
    return (metrics[0], metrics[1]) if len(metrics) == 2 and np.isfinite(metrics).all() else None


def _draw_points(panel: Axes, section: Section, shown: list[Entry], box: Array) -> None:
    """Draw the methods within these limits, with bars and the other settings of each."""
    panel.set(xlim=box[0], ylim=box[1])
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
    panel.set_xticks([tick for tick in panel.get_xticks() if max(box[0][0], 0) <= tick <= box[0][1]])
    panel.set_yticks([tick for tick in panel.get_yticks() if box[1][0] <= tick <= min(box[1][1], 100)])
    panel.set(xlim=box[0], ylim=box[1])
    panel.set_xlabel("average forgetting, points (less is better)")
    panel.set_ylabel("average accuracy, % (more is better)")


def _limits(points: Array) -> Array:
    """Return the limits of the axes, ((left, right), (low, high)): those of the points with a margin."""
    low, high = points.min(0), points.max(0)
    margin = np.maximum(0.08 * (high - low), 0.5)
    return np.column_stack([low - margin, high + margin])


def _inside(point: Array, box: Array) -> bool:
    return bool(((box[:, 0] <= point) & (point <= box[:, 1])).all())


def _crowded(closer: Array, box: Array, methods: int) -> bool:
    """Return whether the better half of many methods fills little of the panel and needs one of its own."""
    return methods > FEW_METHODS and float((np.diff(closer) / np.diff(box)).prod()) < CROWDED_SHARE


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
