"""Learned accuracy against retention: a path for each method over its strengths, and the frontier."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from mooring.lab.study.frontier import Frontier, Sweep
from mooring.report.families import FAMILIES, family_of
from mooring.report.figures.labels import place_labels
from mooring.report.figures.tradeoff import FONT_SIZE, family_marks, wide_panel
from mooring.report.picture import Drawing
from mooring.report.section import Array
from mooring.report.style import FAINT, INK, RULE, add_legend


def draw(frontier: Frontier) -> Drawing:
    """Draw a path for each method over its strengths, labelled at its most accurate setting, and the frontier."""
    figure, panel, size = wide_panel(6.0)
    shown = [sweep for sweep in frontier.sweeps if sweep.best is not None and "forgetting" in sweep.best.metrics]
    for sweep in shown:
        family, path = family_of(sweep.method), _path(sweep)
        panel.plot(*path.T, "-", color=family.colour, lw=0.9, alpha=0.5, zorder=2)
        panel.plot(*path.T, family.marker, color=family.colour, ms=3, mew=0, alpha=0.6, zorder=2)
        panel.plot(*_best(sweep), family.marker, color=family.colour, ms=6, mew=0, zorder=4)
    if edge := [point for point, _ in frontier.envelope]:
        panel.plot(*np.array(edge).T, "-", color=INK, lw=1.6, alpha=0.8, zorder=3)
    if shown:
        _limit(panel, shown)
        _same_accuracy(panel)
        _label(panel, shown, size)
    panel.set_xlabel("retained: 100 minus average forgetting, % (more is better)")
    panel.set_ylabel("learned: accuracy right after each task, % (more is better)")
    present = {family_of(sweep.method).name for sweep in shown}
    marks = family_marks(family for family in FAMILIES if family.name in present)
    add_legend(figure, [*marks, (Line2D([], [], color=INK, lw=1.6), "frontier without stored samples")])
    return Drawing(
        "frontier",
        "Learned against retained",
        "Up and to the right is better; along a dotted line the final accuracy is about the same. Each path is a "
        "method over its strengths, labelled where its final accuracy is highest; settings that failed with some seed "
        "are left out, and so is joint training, which retains nothing.",
        f"Paths of {len(shown)} methods: accuracy right after each task over the share that was retained.",
        figure,
    )


def _path(sweep: Sweep) -> Array:
    points = [(100 - row.metrics["forgetting"].mean, row.metrics["learned"].mean) for row in sweep.finished_rows]
    return np.array(points, dtype=np.float64)


def _best(sweep: Sweep) -> tuple[float, float]:
    assert sweep.best is not None
    return 100 - sweep.best.metrics["forgetting"].mean, sweep.best.metrics["learned"].mean


def _limit(panel: Axes, shown: list[Sweep]) -> None:
    """Limit the axes to the neighbourhood of the best settings: settings that learn or retain nothing are cut off."""
    best = np.array([_best(sweep) for sweep in shown])
    low = np.minimum(best.min(0), np.median(best, 0) - 25)
    every = np.concatenate([_path(sweep) for sweep in shown])
    low = np.maximum(low, every.min(0)) - 1
    panel.set(xlim=(low[0], 100.8), ylim=(low[1], every[:, 1].max() + 1.5))


def _same_accuracy(panel: Axes) -> None:
    """Draw lines of equal final accuracy, which is about learned minus forgotten."""
    (left, right), (low, high) = panel.get_xlim(), panel.get_ylim()
    for accuracy in range(0, 101, 5):
        x = np.array([left, right])
        panel.plot(x, accuracy + 100 - x, ":", color=FAINT, lw=0.5, alpha=0.6, zorder=1)
        top = accuracy + 100 - high
        if left < top < right - 1:
            panel.text(top, high, f"{accuracy}", size=5.5, color=FAINT, ha="left", va="top")
    panel.set(xlim=(left, right), ylim=(low, high))


def _label(panel: Axes, shown: list[Sweep], size: tuple[float, float]) -> None:
    (left, right), (low, high) = panel.get_xlim(), panel.get_ylim()
    corner, scale = np.array([left, low]), np.array([right - left, high - low]) / np.array(size)
    inside = [sweep for sweep in shown if left <= _best(sweep)[0] <= right and low <= _best(sweep)[1] <= high]
    points = (np.array([_best(sweep) for sweep in inside], dtype=np.float64) - corner) / scale
    names = [sweep.best.label for sweep in inside if sweep.best is not None]
    middles = place_labels(points, [0.6 * FONT_SIZE * len(name) for name in names], 1.25 * FONT_SIZE, size)
    for name, point, middle in zip(names, points, middles, strict=True):
        x, y = corner + middle * scale
        panel.text(x, y, name, size=FONT_SIZE, ha="center", va="center_baseline", color=INK, zorder=5)
        ends = corner + np.array([point, middle]) * scale
        if np.hypot(*(middle - point)) > 0.5 * FONT_SIZE * len(name):
            panel.plot(ends[:, 0], ends[:, 1], color=RULE, lw=0.5, zorder=1)
