"""Fixtures and helpers for the targets of the reproduction, in miniature."""

import pytest

from mooring_lab.report.picture import render_drawing
from mooring_lab.report.style import figure_style
from mooring_lab.study.study import Study
from mooring_paper.context.paper_context import PaperContext
from mooring_paper.context.scale import MINIATURE


@pytest.fixture(scope="module")
def context(tmp_path_factory):
    """A miniature reproduction that the tests of a module share."""
    return PaperContext(Study(tmp_path_factory.mktemp("paper") / "paper.sqlite"), MINIATURE.with_data(None))


@pytest.fixture
def fresh_context(tmp_path):
    """A miniature reproduction without any result."""
    return PaperContext(Study(tmp_path / "paper.sqlite"), MINIATURE.with_data(None))


@pytest.fixture
def render():
    """Render the only figure of a result, as its files have it."""

    def render_figure(result):
        with figure_style():
            (figure,) = result.draw()
            return render_drawing(figure, result.name)

    return render_figure
