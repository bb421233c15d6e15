"""The scaling figure: model-steps per second over the size of the fleet, both logarithmic."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from mooring_lab.report.style import FAINT, INK, LINES, figure_style

__all__ = ["draw"]

NAMES = {"tf32": "TF32", "bf16": "bfloat16"}
WIDTH, HEIGHT = 7.0, 4.2
LEFT, RIGHT, TOP, BOTTOM = 0.62, 1.75, 0.55, 0.48
"""The size of the figure, and its margins, in inches."""


def draw(results: dict[str, Any], path: str) -> None:
    """Write the figure of the results of `scaling`."""
    all_series = [series for series in results["curves"] if series["points"]]
    with figure_style():
        figure = Figure(figsize=(WIDTH, HEIGHT))
        box = (LEFT / WIDTH, BOTTOM / HEIGHT, 1 - (LEFT + RIGHT) / WIDTH, 1 - (TOP + BOTTOM) / HEIGHT)
        axes = figure.add_axes(box, xscale="log", yscale="log")
        for colour, series in zip(LINES, all_series, strict=False):
            _lines(axes, series, colour)
        _frame(axes, results, all_series)
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=7, labelspacing=1.0)
        figure.savefig(path, format="png", dpi=150, metadata={"Software": None})


def _lines(axes: Axes, series: dict[str, Any], colour: str) -> None:
    """Plot the measurements, the limit and one eager model, with their entries of the legend."""
    name = NAMES.get(series["dtype"], series["dtype"])
    runs = [point["runs"] for point in series["points"]]
    rates = [point["steps_per_second"] for point in series["points"]]
    limit, eager = 1e6 / series["limit_us"], 1e6 / series["eager_us"]
    speed = f"{rates[-1] / eager:.0f}x eager, {100 * rates[-1] / limit:.0f} % of limit"
    text = f"{name} fleet: {1e6 / rates[-1]:,.0f} us\n{speed}"
    axes.axhline(limit, color=colour, lw=0.9, ls=(0, (5, 3)), label=f"{name} limit: {series['limit_us']:,.0f} us")
    axes.plot(runs, rates, "o-", color=colour, ms=3.5, mew=0, label=text)
    axes.axhline(eager, color=colour, lw=0.9, ls=(0, (1, 2)), label=f"{name} eager: {series['eager_us']:,.0f} us")


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
