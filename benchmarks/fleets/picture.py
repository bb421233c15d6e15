"""The scaling figure: model-steps a second over the size of the fleet, both logarithmic."""

import math
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from mooring.report.figures.labels import apart
from mooring.report.style import FAINT, INK, LINES, drawing

__all__ = ["draw"]

NAMES = {"tf32": "TF32", "bf16": "bfloat16"}
WIDTH, HEIGHT = 7.0, 4.2
LEFT, RIGHT, TOP, BOTTOM, LINE = 0.62, 1.55, 0.55, 0.48, 0.13
"""Inches: the figure, its margins, and the height of a label's line."""


def draw(told: dict[str, Any], path: str) -> None:
    """Write the figure of what `scaling` found."""
    curves = [curve for curve in told["curves"] if curve["points"]]
    with drawing():
        figure = Figure(figsize=(WIDTH, HEIGHT))
        box = (LEFT / WIDTH, BOTTOM / HEIGHT, 1 - (LEFT + RIGHT) / WIDTH, 1 - (TOP + BOTTOM) / HEIGHT)
        axes = figure.add_axes(box, xscale="log", yscale="log")
        labels = [label for colour, curve in zip(LINES, curves, strict=False) for label in _lines(axes, curve, colour)]
        _frame(axes, told, curves)
        _name(axes, labels)
        figure.savefig(path, format="png", dpi=150, metadata={"Software": None})


def _lines(axes: Axes, curve: dict[str, Any], colour: str) -> list[tuple[float, str, str]]:
    """What was measured, the limit above it and one eager model below it; what each is called, and where."""
    name = NAMES.get(curve["dtype"], curve["dtype"])
    runs = [point["runs"] for point in curve["points"]]
    rates = [point["steps_per_second"] for point in curve["points"]]
    limit, eager = 1e6 / curve["limit_us"], 1e6 / curve["eager_us"]
    axes.plot(runs, rates, "o-", color=colour, ms=3.5, mew=0)
    axes.axhline(limit, color=colour, lw=0.9, ls=(0, (5, 3)))
    axes.axhline(eager, color=colour, lw=0.9, ls=(0, (1, 2)))
    said = f"{rates[-1] / eager:.0f}x eager, {100 * rates[-1] / limit:.0f} % of limit"
    return [
        (limit, f"{name} limit: {curve['limit_us']:,.0f} us", colour),
        (rates[-1], f"{name} fleet: {1e6 / rates[-1]:,.0f} us\n{said}", colour),
        (eager, f"{name} eager: {curve['eager_us']:,.0f} us", colour),
    ]


def _frame(axes: Axes, told: dict[str, Any], curves: list[dict[str, Any]]) -> None:
    sizes = sorted({point["runs"] for curve in curves for point in curve["points"]})
    axes.set_xticks(sizes, [str(size) for size in sizes])
    low, high = axes.get_ylim()
    axes.set_ylim(low / 1.25, high * 1.1)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}"))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
    axes.grid(axis="y")
    axes.set_xlabel("runs in the fleet")
    axes.set_title("model-steps a second; times are of one", loc="left", color=FAINT, size=7.5, pad=4)
    said = f"{told['network']}, batch {told['batch']}, {told['method']}, {told['device']}"
    axes.annotate(said, (0, 1), (0, 20), xycoords="axes fraction", textcoords="offset points", size=8.5, color=INK)


def _name(axes: Axes, labels: list[tuple[float, str, str]]) -> None:
    """Write every label beside the end of its line, none on another."""
    tall = HEIGHT - TOP - BOTTOM
    low, high = (math.log(edge) for edge in axes.get_ylim())
    wanted = [(math.log(height) - low) / (high - low) * tall for height, _, _ in labels]
    for (_, text, colour), place in zip(labels, apart(wanted, 2.1 * LINE, tall), strict=True):
        where = {"xycoords": "axes fraction", "textcoords": "offset points"}
        axes.annotate(text, (1, place / tall), (6, 0), color=colour, size=7, va="center", **where)
