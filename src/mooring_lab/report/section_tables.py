"""The tables of a section; each cell has a text and a value to sort by."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from mooring_lab.model.method_versions import without_version
from mooring_lab.model.metric_definitions import DEFINITIONS
from mooring_lab.model.metrics import Interval
from mooring_lab.model.results import Stability
from mooring_lab.report.numbers import MISSING, bounds, count, fixed, general, given, points, printable
from mooring_lab.report.section import Entry, Section

OTHER_METRICS = tuple(name for name in DEFINITIONS if name != "accuracy")
"""The metrics besides accuracy, which has a column for its interval too."""


@dataclass(frozen=True)
class Column:
    """A column: its title, its meaning, its unit, and whether it holds numbers."""

    title: str
    hint: str = ""
    unit: str = ""
    numeric: bool = True


@dataclass(frozen=True)
class Cell:
    """A cell: its text, the value to sort by (None comes last in both orders), and its style."""

    text: str
    sort: float | str | None = None
    note: str = ""
    strong: bool = False
    colour: str = ""


@dataclass(frozen=True)
class PageTable:
    """Columns and rows; the rows are sorted by column `sorted_by` in descending order, or unsorted if it is -1."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    sorted_by: int = -1


def comparison(section: Section) -> PageTable:
    """Return all settings with their metrics, best accuracy first, without columns that say nothing."""
    columns = [
        Column("method", numeric=False),
        Column("strength", "factor of the penalty"),
        Column("lr", "learning rate"),
        _metric_column("accuracy", "; mean ± standard deviation over seeds"),
        Column("95 % interval", "confidence interval of the mean accuracy (Student's t); sorted by its lower end", "%"),
        *map(_metric_column, OTHER_METRICS),
        Column("seeds", "runs that finished", "finished"),
        Column("verdict", numeric=False),
    ]
    if section.baseline is not None:
        names = {entry.row.setting.method: entry.row.name for entry in section.entries}
        name = names.get(section.baseline, without_version(section.baseline))
        columns.insert(5, Column(f"vs {printable(name, 30)}", "accuracy minus the baseline's, seed by seed", "points"))
    ranked = sorted(section.entries, key=lambda entry: (math.isnan(entry.accuracy), -entry.accuracy))
    table = PageTable(columns, [_comparison_row(entry, section) for entry in ranked])
    # The learning rate is in the sentence above the table if there is one only, and so is that all runs finished.
    same_lr = len({entry.row.setting.lr for entry in section.entries}) == 1
    all_finished = not any(entry.row.unfinished for entry in section.entries)
    return _without_empty(table, [*["lr"] * same_lr, *["verdict"] * all_finished], DEFINITIONS["accuracy"].title)


def _metric_column(name: str, addition: str = "") -> Column:
    definition = DEFINITIONS[name]
    return Column(definition.title, f"{definition}{addition}", definition.unit)


def stability(section: Section) -> PageTable | None:
    """Return how close each setting came to divergence; None if no run has a verdict."""
    columns = [
        Column("method", numeric=False),
        Column("strength"),
        Column("p, first task", "largest p of any parameter and seed, after the first task"),
        Column("p, last task", "largest p of any parameter and seed, after the last task reached"),
        Column("safe strength", "smallest over seeds; from this strength on a parameter stops interpolating"),
        Column("free", "parameters with p = 0, mean over seeds", "parameters"),
        Column("interpolate", "parameters with 0 < p < 1, mean over seeds", "parameters"),
        Column("extrapolate", "parameters with p from 1 to the limit of divergence, mean over seeds", "parameters"),
        Column("diverge", "parameters with p beyond this limit or below 0, mean over seeds", "parameters"),
        Column("negative", "parameters with p below 0, mean over seeds", "parameters"),
    ]
    judged = [entry for entry in section.entries if any(result.stability for result in entry.row.results)]
    return PageTable(columns, [_stability_row(entry) for entry in judged]) if judged else None


def _without_empty(table: PageTable, hidden: Sequence[str], sorted_by: str) -> PageTable:
    """Return the table without hidden columns and those in which every cell is missing."""
    cells = zip(*table.rows, strict=True)
    kept = [
        number
        for number, (column, values) in enumerate(zip(table.columns, cells, strict=True))
        if column.title not in hidden and any(cell.text != MISSING for cell in values)
    ]
    columns = [table.columns[number] for number in kept]
    order = next((number for number, column in enumerate(columns) if column.title == sorted_by), -1)
    return PageTable(columns, [[row[number] for number in kept] for row in table.rows], order)


def unfinished(section: Section) -> list[dict[str, Any]]:
    """Return setting, seed, status, number of finished tasks and reason of each unstable or rejected run."""
    runs = [(entry.label, run) for entry in section.entries for run in entry.row.unfinished]
    return [
        {"label": label, "seed": run.spec.seed, "status": run.status, "tasks": len(run.matrix)}
        | {"reason": printable(run.reason) or "no reason recorded"}
        for label, run in runs
    ]


def _comparison_row(entry: Entry, section: Section) -> list[Cell]:
    row = entry.row
    metrics = {name: row.metrics.get(name) for name in DEFINITIONS}
    finished = len(row.results) - len(row.unfinished)
    others = [part for part in entry.detail.split(", ") if part and not part.startswith(("strength ", "lr "))]
    accuracy = metrics["accuracy"]
    low = None if accuracy is None or math.isnan(accuracy.low) else accuracy.low
    cells = [
        Cell(entry.method, entry.method, note=", ".join(others), colour=entry.family.colour),
        _number(row.setting.strength, given(row.setting.strength)),
        _number(row.setting.lr, given(row.setting.lr)),
        _metric(accuracy),
        Cell(bounds(accuracy), low),
        *(_metric(metrics[name]) for name in OTHER_METRICS),
        Cell(f"{finished}" if finished == len(row.results) else f"{finished} of {len(row.results)}", finished),
        Cell(row.verdict or "finished", row.verdict or "finished", strong=bool(row.verdict)),
    ]
    if section.baseline is not None:
        cells.insert(5, _difference(row.difference, row.setting.method == section.baseline))
    return cells


def _difference(interval: Interval | None, is_baseline: bool) -> Cell:
    """Return the difference to the baseline, bold if its interval does not contain 0."""
    if is_baseline:
        return Cell("baseline", 0.0)
    if interval is None or math.isnan(interval.mean):
        return Cell(MISSING)
    significant = not math.isnan(interval.low) and (interval.low > 0 or interval.high < 0)
    note = "" if math.isnan(interval.low) else bounds(interval)
    return Cell(points(interval.mean), interval.mean, note=note, strong=significant)


def _stability_row(entry: Entry) -> list[Cell]:
    verdicts = [result.stability for result in entry.row.results if result.stability]
    first = max((by_task[0].largest for by_task in verdicts), key=_number_first)
    last: list[Stability] = [by_task[-1] for by_task in verdicts]
    largest = max((verdict.largest for verdict in last), key=_number_first)
    safe = min((verdict.safe_strength for verdict in last if not math.isnan(verdict.safe_strength)), default=math.nan)
    names = ("free", "interpolate", "extrapolate", "diverge", "negative")
    counts = [fmean(getattr(verdict, name) for verdict in last) for name in names]
    strength = entry.row.setting.strength
    return [
        Cell(entry.method, entry.method, colour=entry.family.colour),
        _number(strength, given(strength)),
        _number(first, general(first), strong=first >= 1),
        _number(largest, general(largest), strong=largest >= 1),
        _number(safe, general(safe)),
        *(_number(value, count(value)) for value in counts),
    ]


def _metric(interval: Interval | None) -> Cell:
    if interval is None or math.isnan(interval.mean):
        return Cell(MISSING)
    note = "" if math.isnan(interval.std) else f"± {fixed(interval.std)}"
    return Cell(fixed(interval.mean), interval.mean, note=note)


def _number(value: float | None, text: str, strong: bool = False) -> Cell:
    return Cell(text, None if value is None or math.isnan(value) else value, strong=strong)


def _number_first(value: float) -> float:
    return -math.inf if math.isnan(value) else value
