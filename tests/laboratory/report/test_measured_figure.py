"""Tests of the figure of a measured budget."""

import pytest

from mooring.errors import MooringError
from mooring.hold.measure import MeasuredPoint
from mooring_lab.report import draw_measured


def test_figure_is_drawn_and_nothing_measured_is_refused(tmp_path):
    points = [MeasuredPoint(task, step, 0.01 * step, 0.1) for task in (1, 2) for step in range(1, 5)]
    for kind, start in (("png", b"\x89PNG"), ("svg", b"<?xml")):
        assert draw_measured(points, tmp_path / f"measured.{kind}").read_bytes().startswith(start)
    with pytest.raises(MooringError, match="nothing was measured"):
        draw_measured([], tmp_path / "measured.png")
