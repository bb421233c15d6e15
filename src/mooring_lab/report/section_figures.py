"""The figures of a section."""

from collections.abc import Callable
from functools import partial

from mooring_lab.report import layer_figures, loss_figure, matrices, tasks, tradeoff
from mooring_lab.report.picture import Drawing, Picture, render_drawing
from mooring_lab.report.section import Section
from mooring_lab.report.style import figure_style

__all__ = ["draw_pictures"]

_FIGURES: tuple[Callable[[Section], Drawing | None], ...] = (
    *(tradeoff.draw, tasks.draw, matrices.draw, loss_figure.draw),
    *(partial(layer_figures.draw, measure=measure) for measure in layer_figures.MEASURES),
)


def draw_pictures(section: Section) -> list[Picture]:
    """Draw the figures of a section, without those that its runs have no numbers for."""
    with figure_style():
        return [render_drawing(drawing, section.slug) for draw in _FIGURES if (drawing := draw(section)) is not None]
