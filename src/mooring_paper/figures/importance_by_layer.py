"""Importance by layer: does it decrease with depth?"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from statistics import correlation, fmean
from typing import Any

from matplotlib.figure import Figure
from scipy.stats import rankdata

from mooring_lab.model.metrics import Interval, confidence_interval
from mooring_lab.model.results import Result
from mooring_lab.report.logarithm import ticks
from mooring_lab.report.picture import Drawing
from mooring_lab.report.style import WIDTH
from mooring_paper.context.paper_context import MethodRuns, PaperContext, all_runs, paper_setting, train_methods
from mooring_paper.context.scale import REGULARIZERS
from mooring_paper.context.target_result import ResultTable, TargetResult
from mooring_paper.figures.panels import LayerLine, draw_layer_lines, value_range

LayerIntervals = Mapping[str, Interval]
"""log10 of the relative importance of each layer."""


def train_regularizers(context: PaperContext) -> tuple[MethodRuns, str]:
    """Return the runs of the four penalties at the paper's settings, and after which tasks they are measured.

    It is the first task alone, as in the paper; all tasks where only these runs are stored.
    """
    specs = {}
    for condition, name in product(context.scale.first_conditions(), REGULARIZERS):
        runs = context.seed_specs(condition, name, paper_setting(context.scale, condition, name))
        stream = context.first_task(condition.data)
        specs[condition.data, name] = [replace(s, stream=stream.name, data=stream.fingerprint) for s in runs]
    if not all(map(context.has, specs.values())):
        return train_methods(context, {name: name for name in REGULARIZERS}), "after all tasks"
    known = context.run_groups(specs)
    runs_by_data = {data: {name: known[data, name] for name in REGULARIZERS} for data in context.scale.streams}
    return runs_by_data, "after the first task"


def run(context: PaperContext) -> TargetResult:
    """Measure mean importance by layer, relative to the mean over the layers of the run."""
    runs, when = train_regularizers(context)
    tables = []
    lines: dict[str, dict[str, LayerIntervals]] = {}
    for data, methods in runs.items():
        lines[data] = {name: relative_to_mean(results) for name, results in methods.items()}
        rows = [_row(name, layers) for name, layers in lines[data].items()]
        layers = list(dict.fromkeys(layer for intervals in lines[data].values() for layer in intervals))
        columns = ["importance", *layers, "last / first", "rank correlation with depth"]
        title = f"{data}: mean importance by layer {when}, relative to the mean layer"
        tables.append(ResultTable(title, columns, rows))
    return TargetResult("fig-importance", (), tables, all_runs(runs), partial(_draw, lines, when))


def relative_to_mean(results: Sequence[Result]) -> dict[str, Interval]:
    """Return log10 of each layer's importance relative to the mean over the layers of its run, over finished seeds.

    Logarithms, because layers differ by orders of magnitude. A layer without importance is left out.

    Example:
        >>> from mooring_lab.model.spec import RunSpec
        >>> spec = RunSpec("digits", "0", "ewc", 0)
        >>> {layer: round(10**value.mean, 2) for layer, value in relative_to_mean(
        ...     [Result(spec, "finished", "", [], [], importance={"first": 9.0, "last": 1.0})]).items()}
        {'first': 1.8, 'last': 0.2}
    """
    logs: dict[str, list[float]] = {}
    for result in results:
        layers = result.importance if result.status == "finished" else {}
        mean = fmean(layers.values()) if layers else 0.0
        for layer, value in layers.items():
            if value > 0 and 0 < mean < math.inf:
                logs.setdefault(layer, []).append(math.log10(value / mean))
    return {layer: confidence_interval(values) for layer, values in logs.items()}


def depth_correlation(layers: LayerIntervals) -> float | None:
    """Return the rank correlation of a layer's importance with its depth."""
    means = [value.mean for value in layers.values()]
    return rank_correlation(range(len(means)), means)


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Return Spearman's rank correlation; None if either has fewer than two different values.

    Example:
        >>> rank_correlation([0, 1, 2], [9.0, 3.0, 1.0]), rank_correlation([0, 1], [2.0, 2.0])
        (-1.0, None)
    """
    if len(set(x)) < 2 or len(set(y)) < 2:
        return None
    return correlation(rankdata(x).tolist(), rankdata(y).tolist())


def _row(name: str, layers: LayerIntervals) -> dict[str, Any]:
    row: dict[str, Any] = {"importance": name}
    for layer, log in layers.items():
        bounds = "" if math.isnan(log.low) else f" ({10**log.low:.2g} to {10**log.high:.2g})"
        row[layer] = f"{10**log.mean:.3g}{bounds}"
    means = [value.mean for value in layers.values()]
    ratio = 10 ** (means[-1] - means[0]) if means else None
    return {**row, "last / first": ratio, "rank correlation with depth": depth_correlation(layers)}


def _draw(lines_by_data: Mapping[str, Mapping[str, LayerIntervals]], when: str) -> list[Drawing]:
    drawn = {data: methods for data, methods in lines_by_data.items() if any(methods.values())}
    if not drawn:
        return []
    figure = Figure(figsize=(WIDTH, 0.75 + 2.6 * len(drawn)), layout="constrained")
    panels = figure.subplots(len(drawn), 1, squeeze=False)[:, 0]
    for panel, (data, methods) in zip(panels, drawn.items(), strict=True):
        panel.set_title(data, loc="left")
        panel.set_ylabel("importance / mean layer's")
        lines = [LayerLine(n, layers, REGULARIZERS.index(n)) for n, layers in methods.items() if layers]
        low, high = value_range(methods.values())
        low, high = min(low, -0.5), max(high, 0.5)  # at least a decade: smaller differences do not matter
        draw_layer_lines(panel, lines, (low, high))
        y_ticks = ticks(low, high)
        panel.set_yticks(list(y_ticks), list(y_ticks.values()))
    return [
        Drawing(
            "layers",
            "Importance by layer",
            f"Mean importance of the parameters of each layer {when}, relative to the mean layer of the same "
            "run; layers from input to output. Geometric mean over seeds with its 95 % interval, on a logarithmic "
            "scale; intervals are cut off at the edge of the panel.",
            f"Line charts: relative importance by layer for {', '.join(REGULARIZERS)}, on {', '.join(drawn)}.",
            figure,
        )
    ]
