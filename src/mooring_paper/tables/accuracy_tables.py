"""Accuracy and forgetting of every method, ours and the paper's: the main table and that of the second network."""

from collections.abc import Mapping, Sequence
from typing import Any

from mooring_lab.model.results import Result
from mooring_lab.model.spec import RunSpec
from mooring_lab.model.summary import Row
from mooring_paper.context.paper_context import PaperContext, unique_runs
from mooring_paper.context.scale import CONTROLS, REPLAY, ROWS, Condition
from mooring_paper.context.seed_statistics import summarize_seeds
from mooring_paper.context.target_result import CELL_METRICS, PaperCell, ResultTable, TargetResult, make_cell
from mooring_paper.published.published_numbers import Setting, published, published_setting, setting_source
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
    ours = _our_settings(context, conditions, (*methods, *CONTROLS))
    papers = {condition: _paper_settings(condition, methods, ours[condition]) for condition in conditions}
    groups = {
        (condition, at_paper_setting): _specs(context, condition, settings)
        for at_paper_setting, by_condition in ((False, ours), (True, papers))
        for condition, settings in by_condition.items()
    }
    runs = context.run_groups(groups)
    tables: list[ResultTable] = []
    for (condition, at_paper_setting), results in runs.items():
        seed_rows = summarize_seeds(results)
        cells = [_cells(condition, row, at_paper_setting) for row in seed_rows]
        rows = [_table_row(condition, row, by_metric) for row, by_metric in zip(seed_rows, cells, strict=True)]
        title = f"{condition}, {PAPER_SETTINGS if at_paper_setting else OUR_SETTINGS}"
        if rows:
            with_paper = [cell for by_metric in cells for cell in by_metric.values() if cell is not None]
            tables.append(ResultTable(title, list(rows[0]), rows, with_paper))
    return TargetResult(name, (), tables, unique_runs(runs.values()))


def runs_at_our_settings(
    context: PaperContext, conditions: Sequence[Condition], methods: Sequence[str]
) -> dict[Condition, list[Result]]:
    """Return the runs of the tables, each method at the setting of our search."""
    specs = {}
    for condition, settings in _our_settings(context, conditions, (*methods, *CONTROLS)).items():
        specs[condition] = _specs(context, condition, {name: settings[name] for name in methods if name in settings})
    return context.run_groups(specs)


def _our_settings(
    context: PaperContext, conditions: Sequence[Condition], methods: Sequence[str]
) -> dict[Condition, dict[str, Setting]]:
    return {condition: best_settings(choices) for condition, choices in search(context, conditions, methods).items()}


def _paper_settings(condition: Condition, methods: Sequence[str], ours: Mapping[str, Setting]) -> dict[str, Setting]:
    """Return the paper's settings; plain fine-tuning, which it does not give, takes the explicit step's or ours."""
    settings = {}
    for method in methods:
        setting = published_setting(*condition.where, setting_source(method))
        if setting is None and method == "plain":
            setting = ours.get(method)
        if setting is not None:
            settings[method] = setting
    return settings


def _specs(context: PaperContext, condition: Condition, settings: Mapping[str, Setting]) -> list[RunSpec]:
    return [spec for method, setting in settings.items() for spec in context.seed_specs(condition, method, setting)]


def _cells(condition: Condition, row: Row, at_paper_setting: bool) -> dict[str, PaperCell | None]:
    method = row.setting.method
    return {
        metric: make_cell(condition, method, metric, row.metrics.get(metric), at_paper_setting=at_paper_setting)
        for metric in CELL_METRICS
    }


def _table_row(condition: Condition, row: Row, cells: Mapping[str, PaperCell | None]) -> dict[str, Any]:
    paper = published(*condition.where, row.setting.method)
    values: dict[str, Any] = {"method": row.label, "lr": f"{row.setting.lr:g}"}
    for metric, cell in cells.items():
        ours, mean, std = row.metrics.get(metric), getattr(paper, metric, None), getattr(paper, f"{metric}_std", None)
        values[metric] = None if ours is None else str(ours)
        values[f"paper's {metric}"] = None if mean is None else f"{mean:g}" if std is None else f"{mean:g} ± {std:g}"
        values[f"{metric} differs by"] = None if cell is None else round(cell.difference, 2)
        values[f"{metric} agrees"] = None if cell is None else cell.agrees
    return {**values, "verdict": row.verdict}
