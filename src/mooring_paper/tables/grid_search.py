"""The grid search: learning rate and strength of every method, on the first tasks of every data set."""

from collections.abc import Sequence
from typing import Any

from mooring_lab.methods import find_method
from mooring_lab.study.protocol import Choice, choose_settings
from mooring_paper.context.paper_context import PaperContext, unique_runs
from mooring_paper.context.scale import CONTROLS, ROWS, Condition, Scale
from mooring_paper.context.target_result import ResultTable, TargetResult
from mooring_paper.published.published_numbers import Setting, published_setting

SEARCHED_METHODS = (*ROWS, *CONTROLS)


def search_conditions(scale: Scale) -> list[Condition]:
    """Return the conditions of both tables, without duplicates."""
    return list(dict.fromkeys([*scale.conditions(), *scale.second_conditions()]))


def search(
    context: PaperContext, conditions: Sequence[Condition], methods: Sequence[str] = SEARCHED_METHODS
) -> dict[Condition, list[Choice]]:
    """Return the best settings on the searched tasks by the paper's protocol: one seed for each setting of the grid.

    All conditions are trained together. Settings whose penalty does not interpolate everywhere after the first task are
    rejected at that point.
    """
    specs = {
        condition: [
            context.spec(condition, method, 0, Setting(lr, strength), search=True)
            for method in methods
            for lr in context.scale.lrs
            for strength in _strengths(context.scale, method)
        ]
        for condition in conditions
    }
    runs = context.run_groups(specs, reject=True, decides=True)
    return {condition: choose_settings(str(condition), grid, methods) for condition, grid in runs.items()}


def _strengths(scale: Scale, method: str) -> Sequence[float | None]:
    return scale.strengths if find_method(method).has_strength else (None,)


def best_settings(choices: Sequence[Choice]) -> dict[str, Setting]:
    """Return the best setting of each method; methods of which no setting finished are left out."""
    best = {choice.method: choice.best.setting for choice in choices if choice.best is not None}
    return {method: Setting(spec.lr, spec.strength) for method, spec in best.items()}


def run(context: PaperContext) -> TargetResult:
    """Compare the settings of our search with those of the paper's."""
    searched = search(context, search_conditions(context.scale))
    tables = []
    for condition, choices in searched.items():
        rows = [_row(condition, choice) for choice in choices]
        tables.append(ResultTable(str(condition), list(rows[0]), rows))
    tried, dropped = (sum(row[name] for table in tables for row in table.rows) for name in ("tried", "dropped"))
    text = (
        f"The search tried {tried} settings on the first {context.scale.search_tasks} tasks, with one seed each. It "
        f"dropped {dropped} of them because a penalty did not interpolate everywhere or training became unstable."
    )
    runs = unique_runs(row.results for choices in searched.values() for choice in choices for row in choice.grid)
    return TargetResult("grids", [text], tables, runs)


def _row(condition: Condition, choice: Choice) -> dict[str, Any]:
    theirs = published_setting(*condition.where, choice.method)
    ours = best_settings([choice]).get(choice.method)
    values: dict[str, Any] = {"method": choice.method}
    for prefix, setting in (("", ours), ("paper's ", theirs)):
        for name in ("lr", "strength"):
            value = getattr(setting, name, None)
            values[f"{prefix}{name}"] = None if value is None else f"{value:g}"
    return {
        **values,
        "tried": len(choice.grid),
        "dropped": len(choice.dropped),
        "as good": len(choice.as_good) or None,
    }
