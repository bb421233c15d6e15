"""A figure with panels of one size in rows and columns, below its legend."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mooring_lab.report.style import FigureLayout


@dataclass(frozen=True)
class Margins:
    """The space around and between the panels of a figure, in inches.

    Attributes:
        left: left of the first column.
        right: right of the last column.
        top: between the legend and the first row.
        bottom: below the last row.
        across: between columns.
        between: between rows.
    """

    left: float
    right: float
    top: float
    bottom: float
    across: float
    between: float


@dataclass(frozen=True)
class PanelGrid:
    """A figure with a grid of panels.

    Attributes:
        figure: the matplotlib figure.
        axes: the panels in reading order.
        columns: the number of panels in a row.
        layout: the layout of the figure.
        size: the width and height of a panel in inches.
    """

    figure: Figure
    axes: list[Axes]
    columns: int
    layout: FigureLayout
    size: tuple[float, float]

    def set_ticks(self, x: Mapping[float, str], y: Mapping[float, str], xlabel: str, ylabel: str) -> None:
        """Label the outer panels only: ticks make a figure of many panels slow to draw and hard to read."""
        for panel in self.axes[-self.columns :]:
            panel.set_xticks(list(x), list(x.values()))
            panel.set_xlabel(xlabel)
        for panel in self.axes[:: self.columns]:
            panel.set_yticks(list(y), list(y.values()))
            panel.set_ylabel(ylabel)


def add_panels(
    count: int,
    columns: int,
    height_of: Callable[[float], float],
    layout: FigureLayout,
    margins: Margins,
    legend: float,
    **options: Any,
) -> PanelGrid:
    """Return a figure as wide as the layout, with its panels in reading order.

    Args:
        count: the number of panels.
        columns: the number of panels in a row.
        height_of: the height of a panel for its width, both in inches.
        layout: the shape of the figure.
        margins: the space around and between panels.
        legend: the height of the legend, in inches.
        options: options of each panel, as `Figure.add_axes` takes them.
    """
    rows = -(-count // columns)
    width = (layout.width - margins.left - margins.right - margins.across * (columns - 1)) / columns
    height = height_of(width)
    above = margins.top + legend
    total = above + rows * height + (rows - 1) * margins.between + margins.bottom
    figure = Figure(figsize=(layout.width, total))
    panels = []
    for number in range(count):
        row, column = divmod(number, columns)
        left, top = margins.left + column * (width + margins.across), above + row * (height + margins.between)
        box = (left / layout.width, 1 - (top + height) / total, width / layout.width, height / total)
        panels.append(figure.add_axes(box, **options))
    return PanelGrid(figure, panels, columns, layout, (width, height))
