"""Learned accuracy against retention: a path for each method over its strengths, and the frontier."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from mooring_lab.report.closer_look import scatter
from mooring_lab.report.families import FAMILIES, family_of, point_styles
from mooring_lab.report.numbers import shortened
from mooring_lab.report.picture import Drawing
from mooring_lab.report.section import Array
from mooring_lab.report.style import FAINT, INK, MAX_LETTERS
from mooring_lab.study.frontier import Frontier, Sweep


def draw(frontier: Frontier) -> Drawing:
    """Draw a path for each method over its strengths, large at its chosen setting, and the frontier."""
    shown = [sweep for sweep in frontier.sweeps if sweep.best is not None and "forgetting" in sweep.best.metrics]
    points = np.array([_best(sweep) for sweep in shown], dtype=np.float64).reshape(len(shown), 2)
    by_family = sorted(shown, key=lambda sweep: FAMILIES.index(family_of(sweep.method)))
    styles = point_styles(sweep.method for sweep in by_family)
    names = [shortened(sweep.best.label, MAX_LETTERS) for sweep in by_family if sweep.best is not None]
    marks = [(Line2D([], [], ls="", ms=6, **style), name) for style, name in zip(styles, names, strict=True)]
    marks.append((Line2D([], [], color=INK, lw=1.6), "frontier without stored samples"))

    def draw_paths(panel: Axes, box: Array) -> None:
        for sweep, style in zip(by_family, styles, strict=True):
            panel.plot(*_path(sweep).T, lw=0.9, ms=3, alpha=0.5, zorder=2, **style)
            panel.plot(*_best(sweep), ms=6, zorder=4, **style)
        if edge := [point for point, _ in frontier.envelope]:
            panel.plot(*np.array(edge).T, "-", color=INK, lw=1.6, alpha=0.8, zorder=3)
        _same_accuracy(panel, box)
        panel.set_xlabel("retained: 100 minus forgetting (T), % (more is better)")
        panel.set_ylabel("learned: accuracy right after each task, % (more is better)")

    figure, note = scatter(points, _limits(shown), draw_paths, 6.0, marks)
    return Drawing(
        "frontier",
        "Learned against retained",
        "Up and to the right is better; along a dotted line the final accuracy is about the same. Each path is a "
        "method over its strengths, large at the one that was chosen on held-out training images with other seeds; "
        f"settings that failed with some seed are left out, and so is joint training, which retains nothing.{note}",
        f"Paths of {len(shown)} methods: accuracy right after each task over the share that was retained.",
        figure,
    )


def _path(sweep: Sweep) -> Array:
    points = [(100 - row.metrics["forgetting"].mean, row.metrics["learned"].mean) for row in sweep.finished_rows]
    return np.array(points, dtype=np.float64)


def _best(sweep: Sweep) -> tuple[float, float]:
    assert sweep.best is not None
    return 100 - sweep.best.metrics["forgetting"].mean, sweep.best.metrics["learned"].mean


def _limits(shown: list[Sweep]) -> Array:
    """Return limits around the best settings: settings that learn or retain nothing are cut off."""
    if not shown:
        return np.array([[0.0, 100.8], [0.0, 100.8]])
    best = np.array([_best(sweep) for sweep in shown])
    low = np.minimum(best.min(0), np.median(best, 0) - 25)
    every = np.concatenate([_path(sweep) for sweep in shown])
    low = np.maximum(low, every.min(0)) - 1
    return np.array([[low[0], 100.8], [low[1], every[:, 1].max() + 1.5]])


def _same_accuracy(panel: Axes, box: Array) -> None:
    """Draw lines of equal final accuracy, which is about learned minus forgotten."""
    (left, right), (_, high) = box
    step = 5 if right - left > 12 else 1
    for accuracy in range(0, 101, step):
        x = np.array([left, right])
        panel.plot(x, accuracy + 100 - x, ":", color=FAINT, lw=0.5, alpha=0.6, zorder=1)
        top = accuracy + 100 - high
        if left < top < right - 0.02 * (right - left):
            panel.text(top, high, f"{accuracy}", size=5.5, color=FAINT, ha="left", va="top")
