"""CKA by layer to the model after the first task: does balanced importance preserve deep layers and forget less?"""

import math
from collections.abc import Collection, Sequence
from functools import partial
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from mooring_lab.model.metrics import Interval, confidence_interval
from mooring_lab.model.results import Result
from mooring_lab.report.picture import Drawing
from mooring_lab.report.style import WIDTH
from mooring_paper.context.paper_context import MethodRuns, PaperContext, all_runs, train_methods
from mooring_paper.context.scale import REGULARIZERS
from mooring_paper.context.seed_statistics import (
    format_difference,
    format_mean,
    mean_difference,
    metric_values,
)
from mooring_paper.context.target_result import ResultTable, TargetResult
from mooring_paper.figures.panels import LayerLine, draw_layer_lines, value_range
from mooring_paper.tables.grid_search import best_settings, search

REFERENCES = ("uniform", "random", "plain")
SETTING_SOURCES = {
    "plain": "plain",
    **{name: name for name in (*REGULARIZERS, "uniform", "random")},
    **{f"balanced-{name}": name for name in REGULARIZERS},
}
"""Every method, and the method whose setting it uses: balancing does not change the mean importance."""


def train_balanced(context: PaperContext) -> MethodRuns:
    """Return the runs of every method on every data set, at the settings of our search as in the main table."""
    choices = search(context, context.scale.first_conditions(), tuple(dict.fromkeys(SETTING_SOURCES.values())))
    settings = {condition: best_settings(chosen) for condition, chosen in choices.items()}
    return train_methods(context, SETTING_SOURCES, settings)


def run(context: PaperContext) -> TargetResult:
    """Measure CKA by layer of every method, and compare each balanced form with its plain form."""
    runs = train_balanced(context)
    tables = []
    for data, methods in runs.items():
        rows = [_row(name, results) for name, results in methods.items()]
        columns = list(dict.fromkeys(column for row in rows for column in row))
        tables.append(ResultTable(f"{data}: CKA to the model after the first task", columns, rows))
        differences = [_difference_row(name, methods[name], methods[f"balanced-{name}"]) for name in REGULARIZERS]
        tables.append(ResultTable(f"{data}: balanced minus plain form, by seed", list(differences[0]), differences))
    return TargetResult("fig-cka", (), tables, all_runs(runs), partial(_draw, runs))


def deep_cka(result: Result) -> float:
    """Return the mean CKA over the deeper half of the layers, without the middle one; NaN if a run did not finish.

    Example:
        >>> from mooring_lab.model.spec import RunSpec
        >>> run = Result(RunSpec("digits", "0", "ewc", 0), "finished", "", [], [], cka={"1": 1.0, "2": 0.8, "3": 0.4})
        >>> deep_cka(run), shallow_cka(run)
        (0.4, 0.9)
    """
    shallow, deep = _halves(result)
    return _mean(deep or shallow)


def shallow_cka(result: Result) -> float:
    """Return the mean CKA over the layers that `deep_cka` leaves out; NaN if a run did not finish."""
    return _mean(_halves(result)[0])


def _halves(result: Result) -> tuple[list[float], list[float]]:
    values = list(result.cka.values()) if result.status == "finished" else []
    middle = math.ceil(len(values) / 2)
    return values[:middle], values[middle:]


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else math.nan


def _cka_by_layer(results: Sequence[Result]) -> dict[str, Interval]:
    layers: dict[str, list[float]] = {}
    for result in results:
        for layer, value in (result.cka if result.status == "finished" else {}).items():
            if math.isfinite(value):
                layers.setdefault(layer, []).append(value)
    return {layer: confidence_interval(values) for layer, values in layers.items()}


def _row(name: str, results: Sequence[Result]) -> dict[str, Any]:
    spec = results[0].spec
    return {
        "method": name,
        "lr": f"{spec.lr:g}",
        "strength": None if spec.strength is None else f"{spec.strength:g}",
        "accuracy": format_mean(results, "accuracy"),
        "forgetting": format_mean(results, "forgetting"),
        **{layer: f"{value.mean:.3f}" for layer, value in _cka_by_layer(results).items()},
    }


def _difference_row(name: str, plain: Sequence[Result], balanced: Sequence[Result]) -> dict[str, Any]:
    """Compare deep CKA and forgetting; a sign is significant if the 95 % interval excludes 0."""
    cka = mean_difference(([deep_cka(run) for run in balanced], [deep_cka(run) for run in plain]))
    forgetting = mean_difference((metric_values(balanced, "forgetting"), metric_values(plain, "forgetting")))
    return {
        "importance": name,
        "deep CKA": format_difference(cka, "+.2g"),
        "deep CKA is higher": None if cka is None else cka.mean > 0,
        "surely higher": None if cka is None or math.isnan(cka.low) else cka.low > 0,
        "forgetting": format_difference(forgetting),
        "forgets less": None if forgetting is None else forgetting.mean < 0,
        "surely less": None if forgetting is None or math.isnan(forgetting.low) else forgetting.high < 0,
    }


def _missing_note(methods: Collection[str], drawn: Collection[str]) -> str:
    missing = [name for name in methods if name not in drawn]
    return f" No seed of {', '.join(missing)} finished." if missing else ""


def _draw(runs: MethodRuns) -> list[Drawing]:
    drawings = []
    for data, methods in runs.items():
        by_method = {name: layers for name, results in methods.items() if (layers := _cka_by_layer(results))}
        if not any(name in by_method for name in REGULARIZERS):
            continue
        figure = Figure(figsize=(WIDTH, 4.6), layout="constrained")
        panels = figure.subplots(2, 2, sharex=True, sharey=True)
        limits = value_range(by_method.values())
        for panel, importance in zip(panels.flat, REGULARIZERS, strict=True):
            pair = (f"balanced-{importance}", importance)
            lines = [
                LayerLine(name, by_method[name], index, "-" if name in pair else ":")
                for index, name in enumerate((*pair, *REFERENCES))
                if name in by_method
            ]
            panel.set_title(importance, loc="left")
            draw_layer_lines(panel, lines, limits)
            panel.set_ylabel("CKA")
            panel.label_outer()
        drawings.append(
            Drawing(
                f"{data}-layers",
                f"CKA to the model after the first task, by layer: {data}",
                "Debiased linear CKA between the final model and the model after the first task; 1 means that a "
                "layer's representation did not change. One panel for each importance, plain and balanced, with "
                "references: the same importance in every layer (uniform, random) and no penalty (plain). Mean over "
                f"seeds with its 95 % interval, cut off at the edge of the panel.{_missing_note(methods, by_method)}",
                f"Line charts: CKA by layer for {', '.join(by_method)}, on {data}.",
                figure,
            )
        )
    return drawings
