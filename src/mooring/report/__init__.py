"""A study as one page to read, print and send: `write_report`."""

from mooring.report.writer import write_report

__all__ = ["write_report"]
