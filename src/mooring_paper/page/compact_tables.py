"""The tables of a reproduction in a compact form: one row for each method, our numbers beside the paper's."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from mooring_lab.report.numbers import MISSING
from mooring_paper.claims.claim import AT_PAPER_SETTINGS
from mooring_paper.context.target_result import CELL_METRICS, ResultTable, TargetResult

DIGITS = {"accuracy": 1, "forgetting": 2}
"""Decimals of the compact tables, as the paper has them."""

NOT_ALL_SEEDS = "†"
CLAIM_COLUMNS = ("claim", "ours", AT_PAPER_SETTINGS, "paper's", "verdict")
CHANGE_VERDICTS = {
    "explains": ("explains it",),
    "may explain": ("may explain it",),
    "moves it closer": ("moves towards", "overshoots"),
    "moves it away": ("moves away",),
}
"""Columns of the table of changes, and the verdicts that each of them counts."""


def condition_name(title: str) -> str:
    """Return regime and data set from the title of a table.

    Example:
        >>> condition_name("cnn6, 1-epoch, cifar100, at our settings")
        '1-epoch, cifar100'
    """
    return ", ".join(title.split(", ")[1:3])


def compact_table(result: TargetResult, title: str, settings: str) -> ResultTable | None:
    """Return accuracy and forgetting under every condition, ours / the paper's; None if there is no such table.

    A cell that differs is bold, with a sign instead of the stroke.

    Args:
        result: the main table, or that of the second network.
        title: the title of the compact table.
        settings: how the titles of the tables to use end.
    """
    tables = [table for table in result.tables if table.title.endswith(settings)]
    rows: dict[str, dict[str, Any]] = {}
    for table in tables:
        cells = {(cell.method, cell.metric): cell for cell in table.cells}
        for row in table.rows:
            method = row["method"].split()[0]
            compact = rows.setdefault(method, {"method": method})
            for metric in CELL_METRICS:
                cell = cells.get((method, metric))
                text = _compact_cell(row, metric, differs=cell is not None and cell.differs is True)
                compact[f"{condition_name(table.title)}: {metric}"] = text
    columns = ["method", *(f"{condition_name(t.title)}: {metric}" for t in tables for metric in CELL_METRICS)]
    return ResultTable(title, columns, list(rows.values())) if tables else None


def _compact_cell(row: Mapping[str, Any], metric: str, *, differs: bool) -> str:
    """Return a cell as text.

    Example:
        >>> row = {"accuracy": "60.53 ± 2.57", "paper's accuracy": "62.5 ± 0.6", "verdict": ""}
        >>> _compact_cell(row, "accuracy", differs=True), _compact_cell(row, "accuracy", differs=False)
        ('**60.5 ≠ 62.5**', '60.5 / 62.5')
    """
    ours, papers = (format_metric(row[name], metric) for name in (metric, f"paper's {metric}"))
    if ours is not None and row["verdict"]:
        ours += NOT_ALL_SEEDS
    if papers is None:
        return ours or MISSING
    text = f"{ours or MISSING} {'≠' if differs else '/'} {papers}"
    return f"**{text}**" if differs else text


def format_metric(text: str | None, metric: str) -> str | None:
    """Return the mean of a metric as the compact tables show it; None if it is missing.

    Example:
        >>> format_metric("60.53 ± 2.57", "accuracy"), format_metric("0.11 ± 0.04", "forgetting")
        ('60.5', '0.11')
    """
    return None if text is None else f"{float(text.split()[0]):.{DIGITS[metric]}f}"


def settings_table(result: TargetResult) -> ResultTable:
    """Return learning rate and strength under every condition, ours / the paper's, where the paper has a setting."""
    rows: dict[str, dict[str, Any]] = {}
    columns = [table.title.replace(", ", ": ", 1) for table in result.tables]
    for column, table in zip(columns, result.tables, strict=True):
        for row in table.rows:
            if row["paper's lr"] is not None:
                rows.setdefault(row["method"], {"method": row["method"]})[column] = _settings_text(row)
    return ResultTable("Settings, ours / the paper's", ["method", *columns], [*rows.values()])


def _settings_text(row: Mapping[str, Any]) -> str:
    """Return our setting and the paper's as text; what they share is written once.

    Example:
        >>> row = {"lr": "0.001", "strength": "10000", "paper's lr": "0.001", "paper's strength": "1000"}
        >>> _settings_text(row), _settings_text({**row, "paper's lr": "0.01"})
        ('0.001, 10000 / 1000', '0.001, 10000 / 0.01, 1000')
        >>> _settings_text({**row, "strength": "1000"})
        '0.001, 1000 ='
    """
    ours, papers = ([row[f"{whose}{name}"] for name in ("lr", "strength")] for whose in ("", "paper's "))
    if ours == papers:
        return f"{_join_setting(ours)} ="
    same_lr = ours[0] == papers[0] and papers[1] is not None
    return f"{_join_setting(ours)} / {papers[1] if same_lr else _join_setting(papers)}"


def _join_setting(setting: Sequence[str | None]) -> str:
    return ", ".join(text for text in setting if text is not None) or MISSING


def claims_tables(result: TargetResult) -> list[ResultTable]:
    """Return the claims with our numbers and the verdict; a claim that does not hold is bold."""
    tables = []
    for table in result.tables:
        rows = [dict(row) for row in table.rows]
        for row in rows:
            if row["verdict"] == "does not hold":
                row["verdict"] = "**does not hold**"
        columns = [c for c in CLAIM_COLUMNS if c != AT_PAPER_SETTINGS or any(row[c] for row in rows)]
        tables.append(ResultTable(table.title, columns, rows))
    return tables


def changes_table(result: TargetResult) -> ResultTable:
    """Return for each change how many cells it explains or moves; changes without any effect are left out."""
    counts: dict[str, Counter[str]] = {}
    for table in result.tables:
        for row in table.rows:
            for metric in CELL_METRICS:
                if verdict := row.get(f"{metric}: what it does"):
                    counts.setdefault(row["changed"], Counter())[verdict] += 1
    rows = [
        {"change": change, **{name: sum(count[v] for v in verdicts) for name, verdicts in CHANGE_VERDICTS.items()}}
        for change, count in counts.items()
        if any(count[verdict] for verdicts in CHANGE_VERDICTS.values() for verdict in verdicts)
    ]
    return ResultTable("What each change does, in cells", ["change", *CHANGE_VERDICTS], rows)
