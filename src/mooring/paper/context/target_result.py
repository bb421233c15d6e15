"""The result of a target: sentences, tables and figures, with the runs behind them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mooring.lab.model.results import Result
from mooring.paper.context.cell import PaperCell
from mooring.paper.context.scale import Condition

if TYPE_CHECKING:
    from mooring.report.picture import Drawing

__all__ = ["ResultTable", "TargetResult"]


@dataclass(frozen=True)
class ResultTable:
    """A table of a result.

    Attributes:
        title: what it shows.
        columns: the names of its columns, in order.
        rows: a value for each column; a missing value is None.
        cells: the cells that have a number of the paper.
        notes: remarks to print below the table.

    Example:
        >>> rows = [{"method": "ewc", "lr": 0.2}, {"method": "plain"}]
        >>> print(ResultTable("Settings", ["method", "lr"], rows).markdown())
        | method | lr |
        | --- | --- |
        | ewc | 0.20 |
        | plain |  |
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Mapping[str, Any]]
    cells: Sequence[PaperCell] = field(default=(), repr=False)
    notes: Sequence[str] = ()

    def markdown(self) -> str:
        """Return the table as Markdown."""
        lines = [self.columns, ["---"] * len(self.columns)]
        lines += [[_format_value(row.get(column)) for column in self.columns] for row in self.rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)

    def to_json(self) -> dict[str, Any]:
        """Return the table as plain values."""
        table = {"title": self.title, "columns": list(self.columns), "rows": [dict(row) for row in self.rows]}
        return {**table, "notes": list(self.notes)} if self.notes else table


@dataclass(frozen=True)
class TargetResult:
    """The result of a target.

    Attributes:
        name: the name of the target.
        text: the result in sentences, computed from the runs.
        tables: the numbers.
        results: the runs behind them.
        draw: draws the figures; it is called only when they are written, because matplotlib is slow to import.
        reasons: why cells of other targets differ from the paper's, by condition, method and metric.
    """

    name: str
    text: Sequence[str] = ()
    tables: Sequence[ResultTable] = ()
    results: Sequence[Result] = field(default=(), repr=False)
    draw: Callable[[], Sequence["Drawing"]] = field(default=list, repr=False)
    reasons: Mapping[tuple[Condition, str, str], str] = field(default_factory=dict, repr=False)

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain values; runs are given by their keys."""
        return {
            "target": self.name,
            "text": list(self.text),
            "tables": [table.to_json() for table in self.tables],
            "runs": [result.spec.key for result in self.results],
        }


def _format_value(value: Any) -> str:
    """Return a value as the text of a table cell.

    Example:
        >>> _format_value(12.345), _format_value(1e-5), _format_value(None), _format_value(True)
        ('12.35', '1e-05', '', 'yes')
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.2f}" if 0.01 <= abs(value) < 1e5 or value == 0 else f"{value:g}"
    return str(value)
