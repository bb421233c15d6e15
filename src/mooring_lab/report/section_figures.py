"""The figures of a section."""

from collections.abc import Callable

from mooring_lab.report import layer_figures, loss_figure, matrices, tasks, tradeoff
from mooring_lab.report.picture import Drawing, Picture, render_drawing
from mooring_lab.report.section import Section
from mooring_lab.report.style import NARROW, WIDE, FigureLayout, figure_style

__all__ = ["draw_pictures"]

_FIGURES: tuple[Callable[[Section, FigureLayout], Drawing | None], ...] = (
    tradeoff.draw,
    tasks.draw,
    matrices.draw,
    loss_figure.draw,
    layer_figures.draw_importance,
    layer_figures.draw_cka,
    layer_figures.draw_drift,
)


def draw_pictures(section: Section) -> list[Picture]:
    """Draw the figures of a section for desktops and phones, without those that its runs have no numbers for."""
    pictures = []
    with figure_style():
        for draw in _FIGURES:
            wide, narrow = draw(section, WIDE), draw(section, NARROW)
            if wide is not None and narrow is not None:
                pictures.append(render_drawing(wide, section.slug, narrow.figure))
    return pictures
