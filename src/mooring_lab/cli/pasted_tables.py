"""Tables as text to paste: Markdown, LaTeX with booktabs, and CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass

from mooring.errors import MooringError, unknown

FORMATS = ("table", "markdown", "latex", "csv", "json")

LATEX_SPECIALS = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "°": r"$^\circ$",
}


@dataclass(frozen=True)
class TextTable:
    """A table of text.

    Attributes:
        title: the line above the table.
        header: the name of each column.
        rows: the cells of each row.
        bold: the row and column of each cell that is printed in bold.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    bold: frozenset[tuple[int, int]] = frozenset()

    @property
    def numeric(self) -> list[bool]:
        """Whether all cells of a column are numbers or empty; such a column is aligned to the right."""
        return [all(row[number][:1] in "+-0123456789" for row in self.rows) for number in range(len(self.header))]


def check_format(name: str, as_json: bool = False) -> str:
    """Return the format of the output; refuse an unknown one, and two at once.

    Example:
        >>> check_format("table", as_json=True), check_format("latex")
        ('json', 'latex')
    """
    if name not in FORMATS:
        raise unknown("format", name, FORMATS)
    if as_json and name not in ("table", "json"):
        raise MooringError(f"--json and --format {name} were both given: leave one of them out")
    return "json" if as_json else name


def render(table: TextTable, form: str) -> str:
    """Return a table as "markdown", "latex" or "csv".

    Example:
        >>> table = TextTable("", ("method", "%"), (("plain", "80"), ("ewc", "90")), frozenset({(1, 1)}))
        >>> print(render(table, "markdown"))
        | method | % |
        | :--- | ---: |
        | plain | 80 |
        | ewc | **90** |
    """
    return {"markdown": _markdown, "latex": _latex, "csv": _csv}[form](table)


def _markdown(table: TextTable) -> str:
    cells = [
        [f"**{cell}**" if (i, j) in table.bold else cell.replace("|", r"\|") for j, cell in enumerate(row)]
        for i, row in enumerate(table.rows)
    ]
    rules = ["---:" if right else ":---" for right in table.numeric]
    lines = [f"| {' | '.join(line)} |" for line in (table.header, rules, *cells)]
    return "\n".join([*([table.title, ""] if table.title else []), *lines])


def _latex(table: TextTable) -> str:
    """Return a table for the package booktabs; numbers are in math mode, and winners in bold."""
    body = [
        " & ".join(_latex_cell(cell, (i, j) in table.bold) for j, cell in enumerate(row)) + r" \\"
        for i, row in enumerate(table.rows)
    ]
    columns = "".join("r" if right else "l" for right in table.numeric)
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{_latex_text(table.title)}}}",
            rf"\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            " & ".join(map(_latex_text, table.header)) + r" \\",
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
        ]
    )


def _latex_cell(cell: str, bold: bool) -> str:
    if not re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?( ± [\d.]+| \[[-+\d., ]+\])?", cell):
        return rf"\textbf{{{_latex_text(cell)}}}" if bold else _latex_text(cell)
    number = cell.replace("±", r"\pm").replace(", ", r",\, ")
    return rf"$\mathbf{{{number}}}$" if bold else f"${number}$"


def _latex_text(text: str) -> str:
    return "".join(LATEX_SPECIALS.get(character, character) for character in text)


def _csv(table: TextTable) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([table.header, *table.rows])
    return text.getvalue().rstrip("\n")


def merge_columns(records: Sequence[dict[str, object]]) -> TextTable:
    """Return records as one table with a column for every name; a missing or undefined number is empty.

    Example:
        >>> merge_columns([{"a": 1}, {"b": float("nan")}]).rows
        (('1', ''), ('', ''))
    """
    header = tuple(dict.fromkeys(name for record in records for name in record))
    cells = ([record.get(name) for name in header] for record in records)
    return TextTable("", header, tuple(tuple("" if v is None or v != v else str(v) for v in row) for row in cells))
