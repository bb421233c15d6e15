"""The scaling figure: model-steps per second over the size of the fleet, both logarithmic."""

import math
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from mooring_lab.report.figures.labels import spread_labels
from mooring_lab.report.style import FAINT, INK, LINES, figure_style

__all__ = ["draw"]

NAMES = {"tf32": "TF32", "bf16": "bfloat16"}
WIDTH, HEIGHT = 7.0, 4.2
LEFT, RIGHT, TOP, BOTTOM, LINE = 0.62, 1.55, 0.55, 0.48, 0.13
"""The size of the figure, its margins, and the height of a line of text, in inches."""


def draw(results: dict[str, Any], path: str) -> None:
    """Write the figure of the results of `scaling`."""
    all_series = [series for series in results["curves"] if series["points"]]
    with figure_style():
        figure = Figure(figsize=(WIDTH, HEIGHT))
        box = (LEFT / WIDTH, BOTTOM / HEIGHT, 1 - (LEFT + RIGHT) / WIDTH, 1 - (TOP + BOTTOM) / HEIGHT)
        axes = figure.add_axes(box, xscale="log", yscale="log")
        labels = [
            label for colour, series in zip(LINES, all_series, strict=False) for label in _lines(axes, series, colour)
        ]
        _frame(axes, results, all_series)
        _name(axes, labels)
        figure.savefig(path, format="png", dpi=150, metadata={"Software": None})


def _lines(axes: Axes, series: dict[str, Any], colour: str) -> list[tuple[float, str, str]]:
    """Plot the measurements, the limit and one eager model; return the labels and their places."""
    name = NAMES.get(series["dtype"], series["dtype"])
    runs = [point["runs"] for point in series["points"]]
    rates = [point["steps_per_second"] for point in series["points"]]
    limit, eager = 1e6 / series["limit_us"], 1e6 / series["eager_us"]
    axes.plot(runs, rates, "o-", color=colour, ms=3.5, mew=0)
    axes.axhline(limit, color=colour, lw=0.9, ls=(0, (5, 3)))
    axes.axhline(eager, color=colour, lw=0.9, ls=(0, (1, 2)))
    text = f"{rates[-1] / eager:.0f}x eager, {100 * rates[-1] / limit:.0f} % of limit"
    return [
        (limit, f"{name} limit: {series['limit_us']:,.0f} us", colour),
        (rates[-1], f"{name} fleet: {1e6 / rates[-1]:,.0f} us\n{text}", colour),
        (eager, f"{name} eager: {series['eager_us']:,.0f} us", colour),
    ]


def _frame(axes: Axes, results: dict[str, Any], all_series: list[dict[str, Any]]) -> None:
    sizes = sorted({point["runs"] for series in all_series for point in series["points"]})
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
    text = f"{results['network']}, batch {results['batch']}, {results['method']}, {results['device']}"
    axes.annotate(text, (0, 1), (0, 20), xycoords="axes fraction", textcoords="offset points", size=8.5, color=INK)


def _name(axes: Axes, labels: list[tuple[float, str, str]]) -> None:
    """Write every label at the end of its line, without overlaps."""
    height = HEIGHT - TOP - BOTTOM
    low, high = (math.log(edge) for edge in axes.get_ylim())
    positions = [(math.log(rate) - low) / (high - low) * height for rate, _, _ in labels]
    for (_, text, colour), position in zip(labels, spread_labels(positions, 2.1 * LINE, height), strict=True):
        coordinates = {"xycoords": "axes fraction", "textcoords": "offset points"}
        axes.annotate(text, (1, position / height), (6, 0), color=colour, size=7, va="center", **coordinates)
