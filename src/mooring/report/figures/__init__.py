"""The figures of a section, in their order; those that have nothing to show are left out."""

from collections.abc import Callable

from mooring.report.figures import layer_figures as layers
from mooring.report.figures import loss_figure as losses
from mooring.report.figures import matrices, tasks, tradeoff
from mooring.report.picture import Drawing, Picture, picture
from mooring.report.section import Section
from mooring.report.style import drawing

__all__ = ["pictures"]

_DRAWN: tuple[Callable[[Section], Drawing | None], ...] = (
    tradeoff.draw,
    tasks.draw,
    matrices.draw,
    losses.draw,
    layers.draw_importance,
    layers.draw_cka,
    layers.draw_drift,
)


def pictures(section: Section) -> list[Picture]:
    """Every figure that the section's runs have numbers for."""
    with drawing():
        drawn = [made for draw in _DRAWN if (made := draw(section)) is not None]
        return [picture(made, section.slug) for made in drawn]
