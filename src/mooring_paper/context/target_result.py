"""The result of a target: tables, figures and sentences, with the cells to compare and the runs behind them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scipy.special import stdtrit

from mooring_lab.model.metrics import Interval
from mooring_lab.model.results import Result
from mooring_lab.report.picture import Drawing
from mooring_paper.context.scale import Condition
from mooring_paper.published.published_numbers import published

CELL_METRICS = ("accuracy", "forgetting")
PAPER_SEEDS = 5

CellKey = tuple[Condition, str, str]
"""Condition, method and metric of a cell."""

BOUNDS = {"accuracy": 1.0, "forgetting": 0.3}
"""Points by which our mean may differ from the paper's and still counts as the same, whatever the spread over seeds."""


@dataclass(frozen=True)
class PaperCell:
    """A metric of a method, ours and the paper's.

    Attributes:
        condition: network, regime and data set.
        method: a name from the registry.
        metric: "accuracy" or "forgetting".
        ours: our mean over seeds.
        mean, std: the paper's mean and standard deviation; std is None where the paper gives none.
        at_paper_setting: whether our runs used the paper's setting; otherwise they used that of our search.
    """

    condition: Condition
    method: str
    metric: str
    ours: Interval
    mean: float
    std: float | None
    at_paper_setting: bool = True

    @property
    def key(self) -> CellKey:
        """Condition, method and metric."""
        return self.condition, self.method, self.metric

    @property
    def difference(self) -> float:
        """Our mean minus the paper's."""
        return self.ours.mean - self.mean

    @property
    def agrees(self) -> bool | None:
        """Whether the means differ by no more than chance; None if a standard deviation is missing."""
        return means_agree(self.ours, self.mean, self.std)

    @property
    def probably_agrees(self) -> bool | None:
        """Whether the means agree, with our standard deviation in place of one that the paper does not give."""
        return means_agree(self.ours, self.mean, self.ours.std if self.std is None else self.std)

    @property
    def within_bounds(self) -> bool:
        """Whether the means differ by no more than the bound of the metric."""
        return abs(self.difference) <= BOUNDS[self.metric]

    @property
    def differs(self) -> bool | None:
        """Whether the means differ by more than the bound and by more than chance; None if too few seeds finished."""
        if self.within_bounds:
            return False
        return None if self.probably_agrees is None else not self.probably_agrees


def make_cell(
    condition: Condition, method: str, metric: str, ours: Interval | None, *, at_paper_setting: bool = True
) -> PaperCell | None:
    """Return a cell; None if our number or the paper's is missing.

    Example:
        >>> from mooring_lab.model.metrics import confidence_interval
        >>> from mooring_paper.context.scale import PAPER
        >>> cell = make_cell(PAPER.conditions()[0], "explicit-mas", "accuracy", confidence_interval([63.5, 64.5, 64.0]))
        >>> cell.difference, cell.agrees
        (0.0, True)
    """
    paper = published(*condition.where, method)
    if paper is None or ours is None:
        return None
    mean, std = getattr(paper, metric), getattr(paper, f"{metric}_std")
    return PaperCell(condition, method, metric, ours, mean, std, at_paper_setting)


def means_agree(ours: Interval, mean: float, std: float | None, count: int = PAPER_SEEDS) -> bool | None:
    """Return whether two means over seeds differ by no more than chance: Welch's t-test at 95 %.

    |ours - mean| <= t * sqrt(ours_std^2 / n + std^2 / count), with Welch's degrees of freedom. None if either has no
    standard deviation.

    Example:
        >>> from mooring_lab.model.metrics import confidence_interval
        >>> ours = confidence_interval([63.0, 64.0, 65.0, 64.0, 64.0])
        >>> means_agree(ours, 64.5, 0.4), means_agree(ours, 60.0, 0.4), means_agree(ours, 64.5, None)
        (True, False, None)
    """
    if std is None or not math.isfinite(ours.std) or not math.isfinite(std):
        return None
    our_variance, paper_variance = ours.std**2 / ours.count, std**2 / count
    variance = our_variance + paper_variance
    if not variance:
        return ours.mean == mean
    freedom = variance**2 / (our_variance**2 / (ours.count - 1) + paper_variance**2 / (count - 1))
    return bool(abs(ours.mean - mean) <= float(stdtrit(freedom, 0.975)) * math.sqrt(variance))


@dataclass(frozen=True)
class ResultTable:
    """A table of a result.

    Attributes:
        title: what it shows.
        columns: the names of its columns, in order.
        rows: a value for each column; a missing value is None.
        cells: the cells that have a number of the paper.

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

    def markdown(self) -> str:
        """Return the table as Markdown; columns "GROUP: METRIC" are stacked, because a page is narrow.

        Example:
            >>> row = {"method": "ewc", "1-epoch: accuracy": "60.5 / 62.5", "1-epoch: forgetting": "2.1 / 2.1"}
            >>> print(ResultTable("t", list(row), [row]).markdown())
            | method | 1-epoch:<br>accuracy,<br>forgetting |
            | --- | --- |
            | ewc | 60.5 / 62.5<br>2.1 / 2.1 |
        """
        stacks: dict[str, list[str]] = {}
        for column in self.columns:
            group, _, metric = column.rpartition(": ")
            stacks.setdefault(f"{group}:" if metric in CELL_METRICS and group else column, []).append(column)
        heads = [
            name if columns == [name] else f"{name}<br>{',<br>'.join(column.rpartition(': ')[2] for column in columns)}"
            for name, columns in stacks.items()
        ]
        texts = [
            ["<br>".join(_format_value(row.get(column)) for column in columns) for columns in stacks.values()]
            for row in self.rows
        ]
        return "\n".join("| " + " | ".join(line) + " |" for line in (heads, ["---"] * len(heads), *texts))

    def to_json(self) -> dict[str, Any]:
        """Return the table as plain values."""
        return {"title": self.title, "columns": list(self.columns), "rows": [dict(row) for row in self.rows]}


@dataclass(frozen=True)
class TargetResult:
    """The result of a target.

    Attributes:
        name: the name of the target.
        text: sentences that the page shows, computed from the runs.
        tables: the numbers.
        results: the runs behind them.
        draw: draws the figures; it is called only when they are written.
        reasons: why cells of other targets differ from the paper's, in few words; several if any of them explains it.
            None for targets that do not test it.
    """

    name: str
    text: Sequence[str] = ()
    tables: Sequence[ResultTable] = ()
    results: Sequence[Result] = field(default=(), repr=False)
    draw: Callable[[], Sequence[Drawing]] = field(default=list, repr=False)
    reasons: Mapping[CellKey, Sequence[str]] | None = field(default=None, repr=False)

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
