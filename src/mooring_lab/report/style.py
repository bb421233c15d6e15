"""The style of all figures: colours that the page replaces in dark mode, and matplotlib settings."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib
from matplotlib.colors import LinearSegmentedColormap, to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

INK, FAINT, RULE, PAPER = "#1f2428", "#656d76", "#dfe3e8", "#ffffff"
THEMED = {INK: "var(--ink)", FAINT: "var(--faint)", RULE: "var(--rule)", PAPER: "var(--paper)"}
"""The CSS variables that replace these colours in a figure of the page; nothing else may have these colours."""

LINES = ("#0a7bbd", "#d55e00", "#009e73", "#b65f93", "#d98c00", "#45a5e0", "#7d8590")
"""Colours of the lines in one panel."""

WIDTH = 10.0
"""The width of a figure in inches, so that all have the same scale on the page."""


LEGEND_COLUMNS, METHOD_COLUMNS, MAX_LETTERS = 8, 5, 30
"""The columns of a legend of tasks or families and of one of methods, and the longest name of a method in it."""

LEGEND_ROW, NEXT_LEGEND_ROW = 0.18, 0.14
"""The height of the first row of a legend and of each further one, in inches."""

_TASKS = LinearSegmentedColormap.from_list("tasks", ["#2f6fb5", "#2a9d8f", "#c29a1f", "#cf5a36"])

_TICKS = {"color": RULE, "labelcolor": FAINT, "labelsize": 7, "major.size": 2.5, "major.width": 0.7}
_SETTINGS: Any = {
    "axes.axisbelow": True,
    "axes.edgecolor": RULE,
    "axes.facecolor": "none",
    "axes.labelcolor": FAINT,
    "axes.labelsize": 7.5,
    "axes.linewidth": 0.7,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlesize": 8,
    "figure.facecolor": PAPER,
    "font.family": "sans-serif",
    # matplotlib includes DejaVu, so that the layout is the same on every machine.
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 7.5,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.1,
    "savefig.facecolor": PAPER,
    "svg.fonttype": "none",
    "svg.hashsalt": "mooring",
    "text.color": INK,
    # A dollar sign in a name does not start a formula.
    "text.parse_math": False,
    **{f"{axis}tick.{name}": value for axis in "xy" for name, value in _TICKS.items()},
}


@contextmanager
def figure_style() -> Iterator[None]:
    """Apply these matplotlib settings, and restore the user's afterwards."""
    with warnings.catch_warnings(), matplotlib.rc_context():
        # The browser draws the text of an SVG, and has the glyphs that DejaVu lacks.
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from")
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_SETTINGS)
        yield


def task_colours(tasks: int) -> Sequence[str]:
    """Return a colour for each task, from blue for the first to red for the last."""
    return [to_hex(_TASKS(task / max(tasks - 1, 1))) for task in range(tasks)]


def add_legend(figure: Figure, marks: Sequence[tuple[Line2D, str]], columns: int = LEGEND_COLUMNS) -> None:
    """Add a legend above the panels, in rows from left to right."""
    columns = min(len(marks), columns)
    # matplotlib fills a legend by columns.
    by_column = [mark for column in range(columns) for mark in marks[column::columns]]
    handles, texts = zip(*by_column, strict=True)
    anchor = (0.45 / WIDTH, 1.0)
    figure.legend(handles, texts, loc="upper left", ncols=columns, bbox_to_anchor=anchor, labelspacing=0.3)


def legend_height(marks: int, columns: int = LEGEND_COLUMNS) -> float:
    """Return the height of a legend in inches."""
    return LEGEND_ROW + NEXT_LEGEND_ROW * (-(-marks // columns) - 1)
