"""The figure of what was learned against what was kept: a panel for each task, a colour for each method."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from upper_hull import upper_right

from mooring_lab.report.style import FAINT, INK, RULE, figure_style
from peers.adapter_methods import MOORING, PLAIN
from peers.side_by_side import LIMIT, NAMES, Comparison

STYLES = {
    PLAIN: ("#1f2429", "*"),
    MOORING: ("#0a7bbd", "o"),
    "Mooring, every step": ("#063f73", "D"),
    "Mooring, estimated": ("#6fc0ea", "o"),
    "KL on the reference": ("#d55e00", "s"),
    "replay of the reference": ("#009e73", "s"),
    "KL on new inputs": ("#d98c00", "^"),
    "smaller learning rate": ("#8a4fb0", "v"),
    "smaller rank": ("#7d8590", "P"),
    "O-LoRA": ("#c2478a", "X"),
    "LoRA-Null": ("#8c6d46", "^"),
    "CorDA (KPM)": ("#5d8a1f", "v"),
    "OSF": ("#b02a2a", "d"),
    "early stopping": ("#4a4f9e", "<"),
}
"""The colour and the marker of each method, in all panels."""

WIDTH, HEIGHT = 10.0, 5.0
LEAST_LEARNED, LEAST_KEPT = 60, 55
"""The corner of the panel of accuracies, in percent; methods that forget or miss more are not compared further."""


def draw(comparisons: Sequence[Comparison], path: Path) -> None:
    """Write the figure; better is to the upper right in every panel."""
    with figure_style():
        figure = Figure(
            figsize=(WIDTH * len(comparisons) / 3 if len(comparisons) > 1 else 6.0, HEIGHT), layout="constrained"
        )
        panels = figure.subplots(1, len(comparisons), squeeze=False)[0]
        for axes, comparison in zip(panels, comparisons, strict=True):
            _panel(axes, comparison)
        shown = [name for name in NAMES if any(comparison.of(name) for comparison in comparisons)]
        marks = [Line2D([], [], label=name, **_style(name)) for name in shown]
        figure.legend(handles=marks, loc="outside lower center", ncols=3 if len(comparisons) == 1 else 5, fontsize=8)
        figure.savefig(path, dpi=150, metadata={"Software": None} if path.suffix == ".png" else None)


def _style(name: str) -> dict[str, Any]:
    colour, marker = STYLES[name]
    ours = name.startswith(MOORING)
    size = 9 if name == PLAIN else 5.5 if ours else 4.5
    return {"color": colour, "marker": marker, "markersize": size, "linewidth": 2.2 if ours else 1.0}


def _panel(axes: Axes, comparison: Comparison) -> None:
    """Draw the settings of all methods with their intervals, and the hull of each; Mooring comes last."""
    sign = -1 if comparison.gpt else 1  # a rise is better if it is smaller
    for name in sorted(comparison.methods, key=lambda name: (name == MOORING, name.startswith(MOORING))):
        style, above = _style(name), 3 + name.startswith(MOORING) + (name == MOORING)
        settings = comparison.of(name)
        corners = upper_right([(learned, sign * kept) for learned, kept in (s.centre for s in settings)])
        line = {key: style[key] for key in ("color", "linewidth")}
        axes.plot(*zip(*((x, sign * y) for x, y in corners), strict=True), zorder=above, **line)
        for setting in settings:
            errors = [0 if math.isnan(error) else error for error in setting.errors]
            x, y = setting.centre
            dot = {**style, "linestyle": "none", "elinewidth": 0.7, "ecolor": style["color"], "zorder": above}
            container = axes.errorbar(x, y, xerr=errors[0], yerr=errors[1], **dot)
            for bar in container[2]:
                bar.set_alpha(0.4 if name.startswith(MOORING) else 0.25)
    _frame(axes, comparison)


def _frame(axes: Axes, comparison: Comparison) -> None:
    """Limit the axes to the settings, not to their intervals, and name them."""
    centres = [setting.centre for setting in comparison.settings]
    (left, right), (low, high) = ((min(values), max(values)) for values in zip(*centres, strict=True))
    axes.set_title(comparison.title, fontsize=9, color=INK)
    axes.grid(True)
    axes.tick_params(labelsize=8)
    if comparison.gpt:
        axes.set_xlim(max(left - 4, 30), max(right, 100) + 4)
        axes.set_ylim(min(high, 0.45) * 1.06, min(low, 0) - 0.02)
        axes.axhline(LIMIT, color=FAINT, linewidth=0.8, linestyle=(0, (4, 2)), zorder=1)
        axes.set_xlabel("fall of the new loss, % of plain LoRA's", fontsize=8.5)
        axes.set_ylabel("rise of the old loss, nats; up is better", fontsize=8.5)
    else:
        axes.set_xlim(max(left - 3, LEAST_LEARNED), right + 2)
        axes.set_ylim(max(low - 3, LEAST_KEPT), max(high, comparison.before) + 2)
        axes.axhline(comparison.before, color=FAINT, linewidth=0.8, linestyle=(0, (4, 2)), zorder=1)
        axes.annotate(
            "before",
            (axes.get_xlim()[0], comparison.before),
            color=FAINT,
            va="top",
            xytext=(3, -2),
            textcoords="offset points",
        )
        axes.set_xlabel("accuracy on new digits, %", fontsize=8.5)
        axes.set_ylabel("accuracy on old digits, %", fontsize=8.5)
    for spine in axes.spines.values():
        spine.set_color(RULE)
