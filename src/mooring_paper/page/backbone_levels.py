"""What another backbone changes: the main table and the claims of two reproductions, side by side."""

import json
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from mooring.errors import MooringError
from mooring_lab.model.plurals import pluralize
from mooring_lab.report.numbers import MISSING
from mooring_paper.context.scale import EXPLICIT, REGULARIZERS, REPLAY
from mooring_paper.context.target_result import CELL_METRICS, ResultTable
from mooring_paper.page.compact_tables import condition_name, format_metric
from mooring_paper.tables.accuracy_tables import PAPER_SETTINGS

MAIN_ROWS = ("plain", *REGULARIZERS, *EXPLICIT, *REPLAY)
"""The methods of the comparison."""

Findings = Mapping[str, Mapping[str, Any]]
"""The content of `findings.json`, by target."""

VERDICTS = ("holds", "does not hold", "not decided")


def read_findings(path: Path) -> Findings:
    """Return the content of a `findings.json`, by target.

    Raises:
        MooringError: if it cannot be read, or is something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        findings = {entry["target"]: entry for entry in content}
        if not all("title" in table and "rows" in table for entry in content for table in entry["tables"]):
            raise KeyError("tables")
    except OSError as error:
        raise MooringError(f"cannot read {path} ({error.strerror}): give a findings.json of a reproduction") from error
    except (ValueError, TypeError, KeyError) as error:
        raise MooringError(f"{path} has no findings: give a findings.json that `mooring paper` wrote") from error
    return findings


def compare_levels(here: Findings, there: Findings) -> tuple[list[str], list[ResultTable]]:
    """Return sentences and tables: the main rows of both reproductions, and the claims whose verdict differs.

    Claims are matched by their statement.

    Args:
        here: the findings of this reproduction.
        there: the findings of the other one.
    """
    text: list[str] = []
    tables: list[ResultTable] = []
    if rows := _compare_rows(here, there):
        columns = list(dict.fromkeys(name for row in rows for name in row))
        tables.append(ResultTable("Table 1 from both backbones, here / there", columns, rows))
    ours, theirs = _verdicts(here), _verdicts(there)
    if not ours or not theirs:
        return [*text, "The claims cannot be compared: both reproductions need the target `claims`."], tables
    common = [statement for statement in ours if statement in theirs]
    changed = [
        {"claim": statement, "here": ours[statement], "there": theirs[statement]}
        for statement in common
        if ours[statement] != theirs[statement]
    ]
    changed.sort(key=lambda row: (_rank(row["here"]), _rank(row["there"])))
    text.append(
        f"Of {pluralize(len(common), 'claim')} in both, {len(common) - len(changed)} have the same verdict and "
        f"{len(changed)} have another{': ' + _directions(changed) if changed else ''}."
    )
    if changed:
        tables.append(ResultTable("Claims whose verdict depends on the backbone", ("claim", "here", "there"), changed))
    return text, tables


def unmatched_claims(here: Findings, there: Findings) -> list[str]:
    """Return the claims that only one of two reproductions tests, with its verdict."""
    ours, theirs = _verdicts(here), _verdicts(there)
    return [
        f"{statement} (only {place}: {verdict})"
        for place, known, other in (("here", ours, theirs), ("there", theirs, ours))
        for statement, verdict in known.items()
        if statement not in other
    ]


def _directions(changed: Sequence[Mapping[str, str]]) -> str:
    """Return how many verdicts change in which direction.

    Example:
        >>> _directions([{"here": "holds", "there": "does not hold"}, {"here": "not decided", "there": "holds"}])
        '1 holds here and does not hold there, 1 is not decided here and holds there'
    """
    counts: dict[tuple[str, str], int] = {}
    for row in changed:
        counts[row["here"], row["there"]] = counts.get((row["here"], row["there"]), 0) + 1
    clauses = [(count, _clause(here, count), _clause(there, count)) for (here, there), count in counts.items()]
    return ", ".join(f"{count} {here} here and {there} there" for count, here, there in clauses)


def _clause(verdict: str, count: int) -> str:
    """Return a verdict as the verb of a sentence about one claim or several."""
    one = {"not decided": "is not decided"}.get(verdict, verdict)
    several = {"holds": "hold", "does not hold": "do not hold", "not decided": "are not decided"}
    return one if count == 1 else several.get(verdict, verdict)


def _rank(verdict: str) -> int:
    return VERDICTS.index(verdict) if verdict in VERDICTS else len(VERDICTS)


def _verdicts(findings: Findings) -> dict[str, str]:
    tables = findings.get("claims", {}).get("tables", ())
    return {row["claim"]: row["verdict"] for table in tables for row in table["rows"]}


def _compare_rows(here: Findings, there: Findings) -> list[dict[str, str]]:
    numbers = [_main_numbers(findings) for findings in (here, there)]
    columns = [column for column in numbers[0] if column in numbers[1]]
    rows = []
    for method in MAIN_ROWS:
        row = {}
        for column in columns:
            texts = [by_column[column].get(method) for by_column in numbers]
            if any(texts):
                row[column] = " / ".join(text or MISSING for text in texts)
        if row:
            rows.append({"method": method, **row})
    return rows


def _main_numbers(findings: Findings) -> dict[str, dict[str, str | None]]:
    """Return our means in the main table by column and method: at the paper's settings, which do not depend on ours."""
    columns: dict[str, dict[str, str | None]] = {}
    tables = findings.get("table1", {}).get("tables", ())
    for table in [t for t in tables if t["title"].endswith(PAPER_SETTINGS)] or tables:
        for row, metric in product(table["rows"], CELL_METRICS):
            means = columns.setdefault(f"{condition_name(table['title'])}: {metric}", {})
            means[row["method"].split()[0]] = format_metric(row.get(metric), metric)
    return columns
