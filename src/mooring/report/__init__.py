"""Write a study as one self-contained HTML page: `write_report`."""

from mooring.report.writer import write_report

__all__ = ["write_report"]
