"""The figures of a section."""

from collections.abc import Callable

from mooring.report.figures import layer_figures, loss_figure, matrices, tasks, tradeoff
from mooring.report.picture import Drawing, Picture, render_drawing
from mooring.report.section import Section
from mooring.report.style import figure_style

__all__ = ["draw_pictures"]

_FIGURES: tuple[Callable[[Section], Drawing | None], ...] = (
    tradeoff.draw,
    tasks.draw,
    matrices.draw,
    loss_figure.draw,
    layer_figures.draw_importance,
    layer_figures.draw_cka,
    layer_figures.draw_drift,
)


def draw_pictures(section: Section) -> list[Picture]:
    """Draw the figures of a section, without those that its runs have no numbers for."""
    with figure_style():
        drawings = [drawing for draw in _FIGURES if (drawing := draw(section)) is not None]
        return [render_drawing(drawing, section.slug) for drawing in drawings]
