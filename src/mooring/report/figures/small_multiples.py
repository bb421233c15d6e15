"""Small multiples: one panel for each method, all with the same axes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import ScaledTranslation

from mooring.report.numbers import shortened
from mooring.report.section import Entry
from mooring.report.style import FAINT, LEGEND_ROW, FigureLayout

LEFT, RIGHT, TOP, BOTTOM = 0.62, 0.05, 0.72 - LEGEND_ROW, 0.42
ACROSS, BETWEEN = 0.2, 0.48
"""In inches: the margins of the figure below its legend, then the gaps between columns and rows."""


@dataclass(frozen=True)
class PanelGrid:
    """A figure with a grid of panels.

    Attributes:
        figure: the matplotlib figure.
        axes: the panels in reading order, without ticks.
        columns: the number of panels in a row.
        layout: the layout of the figure.
    """

    figure: Figure
    axes: Sequence[Axes]
    columns: int
    layout: FigureLayout

    def set_ticks(self, x: Mapping[float, str], y: Mapping[float, str], xlabel: str, ylabel: str) -> None:
        """Label the outer panels only: ticks make a figure of many panels slow to draw and hard to read."""
        for panel in self.axes[-self.columns :]:
            panel.set_xticks(list(x), list(x.values()))
            panel.set_xlabel(xlabel)
        for panel in self.axes[:: self.columns]:
            panel.set_yticks(list(y), list(y.values()))
            panel.set_ylabel(ylabel)


def make_grid(count: int, ratio: float, layout: FigureLayout, marks: int = 1) -> PanelGrid:
    """Return a grid of panels as wide as the page.

    Args:
        count: the number of panels.
        ratio: the height of a panel over its width.
        layout: the shape of the figure.
        marks: the number of entries of its legend.
    """
    columns = min(4 if count <= 4 else 5 if count <= 10 else 6, layout.panels)
    rows = -(-count // columns)
    width = (layout.width - LEFT - RIGHT - ACROSS * (columns - 1)) / columns
    height = width * ratio
    above = TOP + layout.legend_height(marks)
    total = above + rows * height + (rows - 1) * BETWEEN + BOTTOM
    figure = Figure(figsize=(layout.width, total))
    panels = []
    for number in range(count):
        row, column = divmod(number, columns)
        left, top = LEFT + column * (width + ACROSS), above + row * (height + BETWEEN)
        box = (left / layout.width, 1 - (top + height) / total, width / layout.width, height / total)
        panels.append(figure.add_axes(box, xticks=[], yticks=[]))
    return PanelGrid(figure, panels, columns, layout)


def add_heading(panels: PanelGrid, panel: Axes, entry: Entry) -> None:
    """Write the method, its setting and its accuracy above a panel, with the marker of its family."""
    # A letter is about 4.5 points wide at this size.
    letters = int(panel.get_position().width * panels.layout.width * 72 / 4.5)
    accuracy = "did not finish" if entry.accuracy != entry.accuracy else f"{entry.accuracy:.1f} %"
    _above(panel, 0, 7, 14, shortened(entry.method, letters - 2), size=7.5)
    detail = entry.detail if len(entry.detail) <= letters - 7 else entry.detail.removeprefix("strength ")
    _above(panel, 0, 0, 4.5, shortened(detail, letters - 7), size=6.5, color=FAINT)
    _above(panel, 1, 0, 4.5, accuracy, size=6.5, color=FAINT, ha="right")
    position = panel.transAxes + ScaledTranslation(2.2 / 72, 16.8 / 72, panel.figure.dpi_scale_trans)
    family = entry.family
    panel.plot([0], [1], family.marker, color=family.colour, ms=4, mew=0, clip_on=False, transform=position)


def _above(panel: Axes, x: float, right: float, up: float, text: str, **style: Any) -> None:
    """Write a text at an offset in points from an upper corner of the panel."""
    position = panel.transAxes + ScaledTranslation(right / 72, up / 72, panel.figure.dpi_scale_trans)
    if text:
        panel.text(x, 1, text, transform=position, **style)
