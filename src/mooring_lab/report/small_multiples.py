"""Small multiples: one panel for each method, all with the same axes."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.transforms import ScaledTranslation

from mooring_lab.report.numbers import shortened
from mooring_lab.report.panel_grid import Margins, PanelGrid, add_panels
from mooring_lab.report.section import Entry
from mooring_lab.report.style import FAINT, LEGEND_ROW, FigureLayout

MARGINS = Margins(left=0.62, right=0.05, top=0.72 - LEGEND_ROW, bottom=0.42, across=0.2, between=0.48)


def make_grid(count: int, ratio: float, layout: FigureLayout, marks: int = 1) -> PanelGrid:
    """Return a grid of panels without ticks, as wide as the page.

    Args:
        count: the number of panels.
        ratio: the height of a panel over its width.
        layout: the shape of the figure.
        marks: the number of entries of its legend.
    """
    columns = min(4 if count <= 4 else 5 if count <= 10 else 6, layout.panels)
    legend = layout.legend_height(marks)
    return add_panels(count, columns, lambda width: width * ratio, layout, MARGINS, legend, xticks=[], yticks=[])


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
