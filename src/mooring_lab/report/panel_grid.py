"""Figures with panels of one size in rows and columns, below a legend; small multiples have one for each method."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import ScaledTranslation

from mooring_lab.report.numbers import shortened
from mooring_lab.report.section import Entry
from mooring_lab.report.style import FAINT, LEGEND_ROW, WIDTH, legend_height


class Margins(NamedTuple):
    """The space in inches at the four sides of a figure, between columns, and between rows of panels."""

    left: float
    right: float
    top: float
    bottom: float
    across: float
    between: float


SMALL_MULTIPLES = Margins(left=0.62, right=0.05, top=0.72 - LEGEND_ROW, bottom=0.42, across=0.2, between=0.48)


@dataclass(frozen=True)
class PanelGrid:
    """A figure with panels in reading order, `columns` of them in a row."""

    figure: Figure
    axes: list[Axes]
    columns: int

    def set_ticks(self, x: Mapping[float, str], y: Mapping[float, str], xlabel: str, ylabel: str) -> None:
        """Label the outer panels only: ticks make a figure of many panels slow to draw and hard to read."""
        for panel in self.axes[-self.columns :]:
            panel.set_xticks(list(x), list(x.values()))
            panel.set_xlabel(xlabel)
        for panel in self.axes[:: self.columns]:
            panel.set_yticks(list(y), list(y.values()))
            panel.set_ylabel(ylabel)


def add_panels(
    count: int, columns: int, height_of: Callable[[float], float], margins: Margins, legend: float = 0, **options: Any
) -> PanelGrid:
    """Return a figure as wide as the page, with its panels in reading order.

    Args:
        count: the number of panels.
        columns: the number of panels in a row.
        height_of: the height of a panel for its width, both in inches.
        margins: the space around and between panels; at the top, between the legend and the first row.
        legend: the height of the legend, in inches.
        options: options of each panel, as `Figure.add_axes` takes them.
    """
    rows = -(-count // columns)
    width = (WIDTH - margins.left - margins.right - margins.across * (columns - 1)) / columns
    height = height_of(width)
    above = margins.top + legend
    total = above + rows * height + (rows - 1) * margins.between + margins.bottom
    figure = Figure(figsize=(WIDTH, total))
    panels = []
    for number in range(count):
        row, column = divmod(number, columns)
        left, top = margins.left + column * (width + margins.across), above + row * (height + margins.between)
        box = (left / WIDTH, 1 - (top + height) / total, width / WIDTH, height / total)
        panels.append(figure.add_axes(box, **options))
    return PanelGrid(figure, panels, columns)


def small_multiples(count: int, ratio: float, marks: int = 1) -> PanelGrid:
    """Return a grid of panels without ticks, of this height over width, below a legend of `marks` entries."""
    columns = 4 if count <= 4 else 5 if count <= 10 else 6
    height = legend_height(marks)
    return add_panels(count, columns, lambda width: width * ratio, SMALL_MULTIPLES, height, xticks=[], yticks=[])


def add_heading(panel: Axes, entry: Entry) -> None:
    """Write the method, its setting and its accuracy above a panel, with the marker of its family."""
    # A letter is about 4.5 points wide at this size.
    letters = int(panel.get_position().width * WIDTH * 72 / 4.5)
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
