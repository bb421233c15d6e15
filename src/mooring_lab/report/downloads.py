"""The numbers of a page as CSV files, which the page holds itself: nothing is loaded from elsewhere."""

import base64
import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mooring_lab.report.section import Section


@dataclass(frozen=True)
class Download:
    """A file that the page offers.

    Attributes:
        name: the name of the file.
        description: what it holds.
        lines: the number of its rows, without the header.
        address: its content as a `data:` address.
    """

    name: str
    description: str
    lines: int
    address: str


def downloads(sections: Sequence[Section]) -> list[Download]:
    """Return the files of a page: a row for each setting, and a row for each run."""
    entries = [entry for section in sections for entry in section.entries]
    settings = [entry.row.to_record() for entry in entries]
    runs = [
        {**result.setting_record(), "status": result.status, "reason": result.reason, **result.metrics}
        for entry in entries
        for result in entry.row.results
    ]
    return [
        _download("settings.csv", "a row for each setting: means, deviations and 95 % intervals", settings),
        _download("runs.csv", "a row for each run: one setting with one seed", runs),
    ]


def _download(name: str, description: str, rows: Sequence[dict[str, Any]]) -> Download:
    """Return a CSV file; numbers have all their digits, and missing ones are empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(column for row in rows for column in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows({column: "" if value != value else value for column, value in row.items()} for row in rows)
    content = base64.b64encode(text.getvalue().encode("utf-8", "replace")).decode()
    return Download(name, description, len(rows), f"data:text/csv;charset=utf-8;base64,{content}")
