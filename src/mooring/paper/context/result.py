"""What a target found: tables and words, with the runs behind them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mooring.lab.model.results import Result
from mooring.paper.context.cell import Cell
from mooring.paper.context.scale import Case

if TYPE_CHECKING:
    from mooring.report.picture import Drawing

__all__ = ["Finding", "Table"]


@dataclass(frozen=True)
class Table:
    """Rows under columns.

    Attributes:
        title: what it shows.
        columns: names, in their order.
        rows: a value for each column; None where there is none.
        cells: those of them that stand beside the paper's.
        notes: what is to be said about it, below it.

    Example:
        >>> print(Table("Speed", ["who", "how"], [{"who": "tortoise", "how": 0.2}, {"who": "hare"}]).markdown())
        | who | how |
        | --- | --- |
        | tortoise | 0.20 |
        | hare |  |
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Mapping[str, Any]]
    cells: Sequence[Cell] = field(default=(), repr=False)
    notes: Sequence[str] = ()

    def markdown(self) -> str:
        """As text that is a table wherever Markdown is shown."""
        lines = [self.columns, ["---"] * len(self.columns)]
        lines += [[shown(row.get(column)) for column in self.columns] for row in self.rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        told = {"title": self.title, "columns": list(self.columns), "rows": [dict(row) for row in self.rows]}
        return {**told, "notes": list(self.notes)} if self.notes else told


@dataclass(frozen=True)
class Finding:
    """What a target found.

    Attributes:
        name: the target's.
        text: what came out, in sentences; each is computed.
        tables: the numbers.
        results: the runs they come from.
        draw: makes the figures; only called where they are wanted, since it takes time to import what draws them.
        reasons: why cells of other targets differ from the paper's, by case, method and metric.
    """

    name: str
    text: Sequence[str] = ()
    tables: Sequence[Table] = ()
    results: Sequence[Result] = field(default=(), repr=False)
    draw: Callable[[], Sequence["Drawing"]] = field(default=list, repr=False)
    reasons: Mapping[tuple[Case, str, str], str] = field(default_factory=dict, repr=False)

    def to_json(self) -> dict[str, Any]:
        """As plain values; of the runs their keys."""
        told = {"target": self.name, "text": list(self.text), "tables": [table.to_json() for table in self.tables]}
        return {**told, "runs": [result.spec.key for result in self.results]}


def shown(value: Any) -> str:
    """A value in a cell.

    Example:
        >>> shown(12.345), shown(1e-5), shown(None), shown(True)
        ('12.35', '1e-05', '', 'yes')
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.2f}" if 0.01 <= abs(value) < 1e5 or value == 0 else f"{value:g}"
    return str(value)
