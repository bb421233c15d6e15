"""Write a study as one self-contained HTML page, `write_report`, and draw a measured budget, `draw_measured`."""

from mooring_lab.report.measured_figure import draw_measured
from mooring_lab.report.writer import write_report

__all__ = ["draw_measured", "write_report"]
