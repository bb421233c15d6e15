"""The cells of the tables and the choices of the grid search."""

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

from recomputation.comparison import Disagreement, prints_numbers
from recomputation.run_records import (
    EXPLICIT,
    IMPORTANCES,
    REPLAY,
    Condition,
    Reproduction,
    RunRecord,
    Setting,
    rows_by_setting,
)
from recomputation.seed_intervals import interval, welch_agrees

ROWS = ("plain", *IMPORTANCES, "uniform", "random", *EXPLICIT, *REPLAY)
CONTROLS = ("frozen", "frozen-after-first", "joint")
METRICS = ("accuracy", "forgetting")
PAPER_SEEDS = 5

Row = dict[str, Any]


class GridCell:
    """The search of a method under a condition.

    The best setting is the most accurate that finished; of several, that with the largest learning rate, then the
    smallest strength.

    Attributes:
        runs: every setting with its run.
        dropped: the settings that did not finish.
        best: the setting that is used; None if there is none.
        tied: the other settings with the same accuracy.
    """

    def __init__(self, runs: Sequence[RunRecord]) -> None:
        seeds = {setting: row for (_, _, setting), row in rows_by_setting(runs).items()}
        self.runs = {setting: run for setting, row in seeds.items() for run in row if run.seed == 0}
        self.dropped = [setting for setting, run in self.runs.items() if not run.finished]
        self.best, self.tied = _most_accurate({s: run.accuracy for s, run in self.runs.items() if run.finished})


def _grid_order(setting: Setting) -> tuple[float, float]:
    return -setting.lr, setting.strength or 0.0


def _most_accurate(scores: Mapping[Setting, Fraction]) -> tuple[Setting | None, list[Setting]]:
    """Return the best setting, and the others with the same accuracy."""
    highest = max(scores.values(), default=None)
    equal = sorted((setting for setting, score in scores.items() if score == highest), key=_grid_order)
    return (equal[0], equal[1:]) if equal else (None, [])


def grid_cells(reproduction: Reproduction) -> dict[Condition, dict[str, GridCell]]:
    """Return the search of every method under every condition of the tables."""
    searched = [*reproduction.runs_of("grids"), *reproduction.runs_of("stand-in")]
    runs = [run for run in searched if run.part == "searched"]
    cells: dict[Condition, dict[str, GridCell]] = {}
    everywhere = [*reproduction.main_conditions, *reproduction.second_conditions, *reproduction.stand_in_conditions]
    for condition in dict.fromkeys(everywhere):
        here = [run for run in runs if run.condition == condition]
        cells[condition] = {
            method: GridCell([run for run in here if run.method == method]) for method in (*ROWS, *CONTROLS)
        }
    return cells


def best_settings(reproduction: Reproduction) -> dict[Condition, dict[str, Setting]]:
    """Return our setting of each method; methods without one are left out."""
    return {
        condition: {method: cell.best for method, cell in methods.items() if cell.best is not None}
        for condition, methods in grid_cells(reproduction).items()
    }


def grid_rows(reproduction: Reproduction) -> dict[str, list[Row]]:
    """Return the expected rows of the target `grids`, by title."""
    tables: dict[str, list[Row]] = {}
    for condition, methods in grid_cells(reproduction).items():
        if condition in reproduction.stand_in_conditions:
            continue
        rows = tables[str(condition)] = []
        for method, cell in methods.items():
            papers = reproduction.published_setting(condition, method)
            row = {
                "method": method,
                "lr": _general(cell.best and cell.best.lr),
                "strength": _general(cell.best and cell.best.strength),
                "paper's lr": _general(papers and papers.lr),
                "paper's strength": _general(papers and papers.strength),
                "tried": len(cell.runs),
                "dropped": len(cell.dropped),
                "as good": len(cell.tied) or None,
            }
            rows.append(row)
    return tables


def table_rows(reproduction: Reproduction, target: str) -> dict[str, list[Row]]:
    """Return the expected rows of `table1`, `resnet` or `stand-in`, by title."""
    conditions = {
        "table1": reproduction.main_conditions,
        "resnet": reproduction.second_conditions,
        "stand-in": reproduction.stand_in_conditions,
    }[target]
    methods = tuple(method for method in ROWS if method not in REPLAY) if target == "resnet" else ROWS
    trained = [run for run in reproduction.runs_of(target) if run.part == "trained"]
    seeds, chosen = rows_by_setting(trained), best_settings(reproduction)
    tables: dict[str, list[Row]] = {}
    for condition in conditions:
        ours = {method: chosen[condition].get(method) for method in (*methods, *CONTROLS)}
        papers = {method: reproduction.published_setting(condition, method) for method in methods}
        # The paper does not give the setting of plain fine-tuning.
        rates = [s for s in reproduction.plain_settings(condition) if (condition, "plain", s) in seeds]
        if target != "stand-in":
            papers["plain"] = papers["plain"] or (rates[0] if rates else ours["plain"])
        for settings, where in ((ours, "at our settings"), (papers, "at the paper's settings")):
            tables[f"{condition}, {where}"] = [
                _table_row(reproduction, condition, method, setting, seeds.get((condition, method, setting), []))
                for method, setting in settings.items()
                if setting is not None
            ]
    return {title: rows for title, rows in tables.items() if rows}


def published_rows(reproduction: Reproduction) -> dict[str, list[Row]]:
    """Return the expected rows of `as-published`, by title; tables without runs are left out."""
    runs = reproduction.runs_of("as-published")
    tables: dict[str, list[Row]] = {}
    for (condition, method, setting), seeds in rows_by_setting(runs).items():
        textbook = method.removesuffix("-as-published")
        if method == textbook:
            condition = condition._replace(network=reproduction.scale["second_network"])
        title = f"{condition}, {'with the widths of the published code' if method == textbook else 'as published'}"
        expected = _table_row(reproduction, condition, textbook, setting, seeds)
        label = expected["method"].replace(textbook, method, 1)
        tables.setdefault(title, []).append({**expected, "method": label})
    return tables


def _table_row(
    reproduction: Reproduction, condition: Condition, method: str, setting: Setting, runs: Sequence[RunRecord]
) -> Row:
    paper = reproduction.published_cell(condition, method)
    label = method if setting.strength is None else f"{method} {setting.strength:g}"
    row: Row = {"method": label, "lr": _general(setting.lr)}
    finished = [run for run in runs if run.finished]
    for metric in METRICS:
        ours = interval([value for run in finished if (value := run.metric(metric)) is not None])
        mean, std = paper.get(metric), paper.get(f"{metric}_std")
        both = ours is not None and mean is not None
        row[metric] = None if ours is None else [ours.mean, *([ours.std] if ours.seeds > 1 else [])]
        row[f"paper's {metric}"] = None if mean is None else [mean] if std is None else [mean, std]
        row[f"{metric} differs by"] = ours.mean - mean if ours is not None and mean is not None else None
        row[f"{metric} agrees"] = welch_agrees(ours, mean, std, PAPER_SEEDS) if both else None
    counts = {status: sum(run.status == status for run in runs) for status in ("unstable", "rejected")}
    row["verdict"] = ", ".join(f"{status} in {n} of {len(runs)}" for status, n in counts.items() if n)
    return row


def _general(value: float | None) -> str | None:
    return None if value is None else f"{value:g}"


def compare_tables(
    reproduction: Reproduction, target: str, tables: dict[str, list[Row]]
) -> tuple[int, list[Disagreement]]:
    """Return how many cells were recomputed, and the disagreements with the tables of a target."""
    with_methods = [table for table in reproduction.findings[target]["tables"] if "claim" not in table["columns"]]
    written = {table["title"]: table["rows"] for table in with_methods}
    count = sum(len(row) - 1 for rows in tables.values() for row in rows)
    return count, list(_compare(target, written, tables))


def _compare(target: str, written: dict[str, list[Row]], tables: dict[str, list[Row]]) -> Iterator[Disagreement]:
    for title in dict.fromkeys([*tables, *written]):
        by_label = [{row["method"]: row for row in rows.get(title, [])} for rows in (written, tables)]
        theirs, ours = by_label
        for label in dict.fromkeys([*ours, *theirs]):
            where = f"{target}, {title}, {label}"
            if label not in ours or label not in theirs:
                present = ["a row" if label in rows else "no row" for rows in (theirs, ours)]
                yield Disagreement(where, *present)
                continue
            for column, expected in ours[label].items():
                # Joint training learns all tasks all the time: only earlier versions wrote a forgetting.
                if (label, column, theirs[label].get(column)) == ("joint", "forgetting", None):
                    continue
                if not _same(theirs[label].get(column), expected):
                    yield Disagreement(f"{where}, {column}", theirs[label].get(column), expected)


def _same(written: Any, expected: Any) -> bool:
    if isinstance(expected, list):
        return isinstance(written, str) and prints_numbers(written, expected)
    if isinstance(expected, float):  # rounded to two decimals
        return isinstance(written, int | float) and abs(written - expected) <= 0.005 + 1e-9
    return bool(written == expected)
