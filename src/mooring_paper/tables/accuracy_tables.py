"""Accuracy and forgetting of every method, ours and the paper's: the main table and that of the second network."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from mooring_lab.model.metrics import paired_difference
from mooring_lab.model.spec import RunSpec
from mooring_lab.model.summary import Row
from mooring_paper.context.paper_context import PaperContext
from mooring_paper.context.scale import CONTROLS, REPLAY, ROWS, Condition
from mooring_paper.context.seed_statistics import summarize_seeds
from mooring_paper.context.target_result import CELL_METRICS, PaperCell, ResultTable, TargetResult, make_cell
from mooring_paper.published.published_numbers import (
    PLAIN_SETTING_NOTE,
    Setting,
    published,
    published_setting,
    setting_source,
)
from mooring_paper.tables.grid_search import best_settings, search

SECOND_ROWS = tuple(name for name in ROWS if name not in REPLAY)
"""The methods of the second network's table: the paper has no replay there."""

OUR_SETTINGS, PAPER_SETTINGS = "at our settings", "at the paper's settings"
"""How the titles of the tables end."""


def table1(context: PaperContext) -> TargetResult:
    """Return the main table, at the settings of our search and at the paper's."""
    return _compare(context, "table1", context.scale.conditions(), ROWS)


def resnet(context: PaperContext) -> TargetResult:
    """Return the same table for the second network."""
    return _compare(context, "resnet", context.scale.second_conditions(), SECOND_ROWS)


def _compare(context: PaperContext, name: str, conditions: Sequence[Condition], methods: Sequence[str]) -> TargetResult:
    """Train every condition at our settings and at the paper's, all together, and compare with the paper."""
    searched = (*methods, *CONTROLS)
    ours = {c: best_settings(choices) for c, choices in search(context, conditions, searched).items()}
    papers = {condition: _paper_settings(condition, methods, ours[condition]) for condition in conditions}
    groups = [
        (condition, _specs(context, condition, settings), at_paper_setting)
        for at_paper_setting, by_condition in ((False, ours), (True, papers))
        for condition, settings in by_condition.items()
    ]
    known = context.run([spec for _, specs, _ in groups for spec in specs])
    tables: list[ResultTable] = []
    # A row is counted once where our setting is the paper's.
    unique_rows: dict[tuple[str, ...], dict[str, Any]] = {}
    remarks: list[str] = []
    for condition, specs, at_paper_setting in groups:
        seed_rows = summarize_seeds(known[spec] for spec in specs)
        cells = [_cells(condition, row, at_paper_setting) for row in seed_rows]
        rows = [_table_row(condition, row, by_metric) for row, by_metric in zip(seed_rows, cells, strict=True)]
        title = f"{condition}, {PAPER_SETTINGS if at_paper_setting else OUR_SETTINGS}"
        if rows:
            with_paper = [cell for by_metric in cells for cell in by_metric.values() if cell is not None]
            tables.append(ResultTable(title, list(rows[0]), rows, with_paper))
        unique_rows |= {(str(condition), row["method"], row["lr"]): row for row in rows}
        remarks += _compare_with_controls(str(condition), seed_rows)
    for condition, settings in ours.items():
        if missing := [method for method in searched if method not in settings]:
            remarks.append(f"{condition}: no setting of {', '.join(missing)} finished the search.")
    text = [*_agreement(list(unique_rows.values()), tables), *_plain_setting_note(conditions), *remarks]
    return TargetResult(name, text, tables, list(known.values()))


def rows_at_our_settings(
    context: PaperContext, conditions: Sequence[Condition], methods: Sequence[str]
) -> dict[Condition, list[Row]]:
    """Return the rows of the tables, each method at the setting of our search."""
    choices = search(context, conditions, (*methods, *CONTROLS))
    specs = {}
    for condition, chosen in choices.items():
        settings = best_settings(chosen)
        specs[condition] = _specs(context, condition, {name: settings[name] for name in methods if name in settings})
    known = context.run([spec for group in specs.values() for spec in group])
    return {condition: summarize_seeds(known[spec] for spec in group) for condition, group in specs.items()}


def _paper_settings(condition: Condition, methods: Sequence[str], ours: Mapping[str, Setting]) -> dict[str, Setting]:
    """Return the paper's settings; plain fine-tuning, which it does not give, takes the explicit step's or ours."""
    where = (condition.network, condition.regime.name, condition.data)
    settings = {}
    for method in methods:
        setting = published_setting(*where, setting_source(method))
        if setting is None and method == "plain":
            setting = ours.get(method)
        if setting is not None:
            settings[method] = setting
    return settings


def _specs(context: PaperContext, condition: Condition, settings: Mapping[str, Setting]) -> list[RunSpec]:
    seeds = range(context.scale.seeds)
    return [context.spec(condition, method, seed, setting) for method, setting in settings.items() for seed in seeds]


def _cells(condition: Condition, row: Row, at_paper_setting: bool) -> dict[str, PaperCell | None]:
    method = row.setting.method
    return {
        metric: make_cell(condition, method, metric, row.metrics.get(metric), at_paper_setting=at_paper_setting)
        for metric in CELL_METRICS
    }


def _table_row(condition: Condition, row: Row, cells: Mapping[str, PaperCell | None]) -> dict[str, Any]:
    paper = published(condition.network, condition.regime.name, condition.data, row.setting.method)
    values: dict[str, Any] = {"method": row.label, "lr": f"{row.setting.lr:g}"}
    for metric, cell in cells.items():
        ours, mean, std = row.metrics.get(metric), getattr(paper, metric, None), getattr(paper, f"{metric}_std", None)
        values[metric] = None if ours is None else str(ours)
        values[f"paper's {metric}"] = None if mean is None else f"{mean:g}" if std is None else f"{mean:g} ± {std:g}"
        values[f"{metric} differs by"] = None if cell is None else round(cell.difference, 2)
        values[f"{metric} agrees"] = None if cell is None else cell.agrees
    return {**values, "verdict": row.verdict}


def _compare_with_controls(condition: str, rows: Sequence[Row]) -> list[str]:
    """Return sentences about the methods that are not significantly more accurate than a frozen backbone."""
    sentences = []
    by_name = {row.setting.method: row for row in rows if not row.unfinished}
    for control in ("frozen", "frozen-after-first"):
        if control not in by_name:
            continue
        base = {result.spec.seed: result.metrics["accuracy"] for result in by_name[control].results}
        worse, not_better = list[str](), list[str]()
        for name, row in by_name.items():
            ours = [result.metrics["accuracy"] for result in row.results]
            difference = paired_difference(ours, [base[result.spec.seed] for result in row.results])
            if name not in CONTROLS and difference.low <= 0:  # NaN with one seed, which says nothing
                (worse if difference.high < 0 else not_better).append(name)
        if worse:
            which = f"significantly more accurate than {', '.join(worse)}"
            sentences.append(f"{condition}: the control {control} is {which}.")
        if not_better:
            which = f"these are not significantly more accurate than {control}: {', '.join(not_better)}"
            sentences.append(f"{condition}: with {len(base)} seeds, {which}.")
    return sentences


def _plain_setting_note(conditions: Sequence[Condition]) -> list[str]:
    """Return the note on the setting of plain fine-tuning, if the paper has settings for any condition."""
    settings = [published_setting(c.network, c.regime.name, c.data, "explicit-ewc") for c in conditions]
    return [PLAIN_SETTING_NOTE] if any(settings) else []


def _agreement(rows: Sequence[Mapping[str, Any]], tables: Sequence[ResultTable]) -> list[str]:
    """Return sentences: how many cells agree with the paper, why others were not compared, and which did not finish."""
    compared, skipped = [], Counter[str]()
    for row, metric in product(rows, CELL_METRICS):
        agrees, theirs = row[f"{metric} agrees"], row[f"paper's {metric}"]
        if agrees is not None:
            compared.append(agrees)
            continue
        missing = "no run of ours finished" if row[metric] is None else "there is no standard deviation"
        skipped["the paper has no number" if theirs is None else missing] += 1
    text = []
    if compared:
        others = "".join(f"; for {count} {reason}" for reason, count in skipped.items())
        text.append(
            f"{sum(compared)} of {len(compared)} cells agree with the paper within the 95 % interval of the difference"
            f"{others}."
        )
    unstable = [f"{row['method']} ({table.title})" for table in tables for row in table.rows if row["verdict"]]
    if unstable:
        text.append(f"Not all seeds finished: {', '.join(unstable)}.")
    return text
