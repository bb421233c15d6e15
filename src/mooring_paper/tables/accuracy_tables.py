"""Accuracy and forgetting of every method, ours and the paper's: the main table and that of the second network."""

from collections.abc import Mapping, Sequence
from typing import Any

from mooring_lab.model.plurals import pluralize
from mooring_lab.model.results import Result
from mooring_lab.model.spec import RunSpec
from mooring_lab.model.summary import Row
from mooring_paper.context.paper_context import PaperContext, unique_runs
from mooring_paper.context.scale import CONTROLS, PUBLISHED_SUFFIX, REPLAY, ROWS, Condition, Scale
from mooring_paper.context.seed_statistics import summarize_seeds
from mooring_paper.context.target_result import CELL_METRICS, PaperCell, ResultTable, TargetResult, make_cell
from mooring_paper.published.published_numbers import Setting, published, published_setting, setting_source
from mooring_paper.tables.grid_search import best_settings, search

SECOND_ROWS = tuple(name for name in ROWS if name not in REPLAY)
"""The methods of the second network's table: the paper has no replay there."""

OUR_SETTINGS, PAPER_SETTINGS = "at our settings", "at the paper's settings"
AS_PUBLISHED, CODE_WIDTHS = "as published", "with the widths of the published code"
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
    papers = {c: _paper_settings(context, c, methods, ours[c]) for c in conditions}
    groups = {
        (condition, at_paper_setting): _specs(context, condition, settings)
        for at_paper_setting, by_condition in ((False, ours), (True, papers))
        for condition, settings in by_condition.items()
    }
    runs = context.run_groups(groups)
    tables = [
        condition_table(condition, results, PAPER_SETTINGS if at_paper_setting else OUR_SETTINGS)
        for (condition, at_paper_setting), results in runs.items()
        if results
    ]
    text = [line for (c, at_papers), results in runs.items() if at_papers for line in _outside_bound(c, results)]
    return TargetResult(name, text, tables, unique_runs(runs.values()))


def _outside_bound(condition: Condition, results: Sequence[Result]) -> list[str]:
    """Return a sentence for each penalty that leaves the paper's stability bound after the first task."""
    sentences = []
    for row in summarize_seeds(results):
        largest = [run.stability[0].largest for run in row.results if run.stability]
        if largest and max(largest) >= 1:
            stable = sum(run.status != "unstable" for run in row.results)
            sentences.append(
                f"{row.label} on {condition.data} in {condition.regime.name} is outside of the paper's own bound "
                f"lr * strength * importance < 1 (up to {max(largest):.3g} after the first task), and stable in "
                f"{stable} of {pluralize(len(row.results), 'seed')}."
            )
    return sentences


def condition_table(condition: Condition, results: Sequence[Result], settings: str) -> ResultTable:
    """Return the table of a condition: a row for each method, and cells where the paper has numbers.

    Args:
        condition: network, regime and data set.
        results: the runs of its methods, or of those of the authors' code; at least one.
        settings: the end of the title.
    """
    rows = summarize_seeds(results)
    cells = [_cells(condition, row, at_paper_setting=settings != OUR_SETTINGS) for row in rows]
    values = [_table_row(condition, row, by_metric) for row, by_metric in zip(rows, cells, strict=True)]
    with_paper = [cell for by_metric in cells for cell in by_metric.values() if cell is not None]
    return ResultTable(f"{condition}, {settings}", list(values[0]), values, with_paper)


def second_specs(context: PaperContext, condition: Condition) -> list[RunSpec]:
    """Return the runs of the second network at the paper's settings."""
    return _specs(context, condition, _paper_settings(context, condition, SECOND_ROWS, {}))


def runs_at_paper_settings(
    context: PaperContext, conditions: Sequence[Condition], methods: Sequence[str]
) -> dict[Condition, list[Result]]:
    """Return the runs of the tables, each method at the paper's setting; without methods that have none."""
    papers = {condition: _paper_settings(context, condition, methods, {}) for condition in conditions}
    return context.run_groups({c: _specs(context, c, settings) for c, settings in papers.items()})


def runs_at_our_settings(
    context: PaperContext, conditions: Sequence[Condition], methods: Sequence[str]
) -> dict[Condition, list[Result]]:
    """Return the runs of the tables, each method at the setting of our search."""
    specs = {}
    searched = tuple(dict.fromkeys((*methods, *CONTROLS)))
    for condition, settings in _our_settings(context, conditions, searched).items():
        specs[condition] = _specs(context, condition, {name: settings[name] for name in methods if name in settings})
    return context.run_groups(specs)


def _our_settings(
    context: PaperContext, conditions: Sequence[Condition], methods: Sequence[str]
) -> dict[Condition, dict[str, Setting]]:
    return {condition: best_settings(choices) for condition, choices in search(context, conditions, methods).items()}


def _paper_settings(
    context: PaperContext, condition: Condition, methods: Sequence[str], ours: Mapping[str, Setting]
) -> dict[str, Setting]:
    """Return the paper's settings; plain fine-tuning, which it does not give, takes the explicit step's or ours.

    With the second network it takes the rate below EWC's, as the paper says of it, if there are such runs.
    """
    settings = {}
    for method in methods:
        setting = published_setting(*condition.where, setting_source(method))
        if setting is None and method == "plain":
            setting = ours.get(method)
        if method == "plain" and condition.network == context.scale.second_network != context.scale.network:
            slower = _below_ewc(context.scale, condition)
            if slower is not None and context.has(context.seed_specs(condition, method, slower)):
                setting = slower
        if setting is not None:
            settings[method] = setting
    return settings


def _below_ewc(scale: Scale, condition: Condition) -> Setting | None:
    """Return the largest rate of the grid below the paper's for EWC.

    Example:
        >>> from mooring_paper.context.scale import PAPER
        >>> [_below_ewc(PAPER, condition).lr for condition in PAPER.second_conditions()]
        [0.001, 0.003, 0.003]
    """
    ewc = published_setting(*condition.where, "ewc")
    slower = [lr for lr in scale.lrs if ewc is not None and lr < ewc.lr]
    return Setting(max(slower), None) if slower else None


def _specs(context: PaperContext, condition: Condition, settings: Mapping[str, Setting]) -> list[RunSpec]:
    return [spec for method, setting in settings.items() for spec in context.seed_specs(condition, method, setting)]


def _cells(condition: Condition, row: Row, *, at_paper_setting: bool) -> dict[str, PaperCell | None]:
    method = row.setting.method.removesuffix(PUBLISHED_SUFFIX)
    return {
        metric: make_cell(condition, method, metric, row.metrics.get(metric), at_paper_setting=at_paper_setting)
        for metric in CELL_METRICS
    }


def _table_row(condition: Condition, row: Row, cells: Mapping[str, PaperCell | None]) -> dict[str, Any]:
    paper = published(*condition.where, row.setting.method.removesuffix(PUBLISHED_SUFFIX))
    values: dict[str, Any] = {"method": row.label, "lr": f"{row.setting.lr:g}"}
    for metric, cell in cells.items():
        ours, mean, std = row.metrics.get(metric), getattr(paper, metric, None), getattr(paper, f"{metric}_std", None)
        values[metric] = None if ours is None else str(ours)
        values[f"paper's {metric}"] = None if mean is None else f"{mean:g}" if std is None else f"{mean:g} ± {std:g}"
        values[f"{metric} differs by"] = None if cell is None else round(cell.difference, 2)
        values[f"{metric} agrees"] = None if cell is None else cell.agrees
    return {**values, "verdict": row.verdict}
