"""Forgetting and accuracy against the accuracy of the backbone that the runs start from."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import linear_regression
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mooring_lab.model.metrics import confidence_interval
from mooring_lab.model.results import Result
from mooring_lab.report.picture import Drawing
from mooring_lab.report.style import INK, LINES, WIDTH
from mooring_lab.study.pretraining import read_metadata
from mooring_paper.context.paper_context import PaperContext, paper_setting, unique_runs
from mooring_paper.context.scale import EXPLICIT, REGULARIZERS, Condition
from mooring_paper.context.seed_statistics import (
    format_difference,
    format_mean,
    mean_difference,
    metric_values,
    seed_interval,
)
from mooring_paper.context.target_result import CELL_METRICS, ResultTable, TargetResult
from mooring_paper.published.published_numbers import PLAIN_SETTING_NOTE, published

PENALTIES = (*REGULARIZERS, "uniform")
FAMILIES = {"plain": ("plain",), "the penalties": PENALTIES, "the explicit step": EXPLICIT}
METHODS = tuple(method for family in FAMILIES.values() for method in family)
METRICS = ("forgetting", "accuracy")
MARKERS = {"o": "circles", "s": "squares", "^": "triangles", "D": "diamonds"}
"""The marks of the schedules of pre-training, and what the caption calls them."""

MAX_SEEDS = 3
"""Seeds of each backbone: more backbones say more about the trend than more seeds."""

NOT_RUN = (
    "Not run: it needs backbones of several accuracies. Put cifar10 into the folder of --data and name a --recipe, so "
    "that they are pre-trained."
)

LevelRuns = Mapping[str, Mapping[str, Sequence[Result]]]
"""The runs of a data set by method and by the fingerprint of the backbone; one for each seed."""


def run(context: PaperContext) -> TargetResult:
    """Compare plain training, penalties and the explicit step from backbones of different accuracies."""
    if not context.levels:
        return TargetResult("fig-backbone", [NOT_RUN])
    levels = dict(sorted(context.levels.items(), key=lambda level: level[1]))
    names = {fingerprint: Path(context.weights[fingerprint].path).name for fingerprint in levels}
    trained = train_levels(context)
    tables, text = [], []
    for condition, runs in trained.items():
        for metric in METRICS:
            rows = [_row(names[init], levels[init], runs, init, metric) for init in levels]
            papers = {m: getattr(cell, metric) for m in METHODS if (cell := published(*condition.where, m))}
            rows += [{"backbone": "the paper's", **papers}] if papers else []
            title = f"{condition.data}: {metric} by backbone"
            tables.append(ResultTable(title, ["backbone", "its accuracy", *METHODS], rows))
        text += [_change(condition.data, levels, runs), *_closest(condition, levels, runs)]
        text += _unfinished(condition.data, runs)
    if any(published(*c.where, "plain") for c in trained):
        text.append(PLAIN_SETTING_NOTE)
    results = unique_runs(seeds for runs in trained.values() for starts in runs.values() for seeds in starts.values())
    schedules = {init: str(read_metadata(context.weights[init].path).get("schedule", "")) for init in levels}
    return TargetResult("fig-backbone", text, tables, results, partial(_draw, trained, levels, schedules))


def train_levels(context: PaperContext) -> dict[Condition, LevelRuns]:
    """Return the runs of every method from every backbone, at the paper's settings."""
    conditions, seeds = context.scale.first_conditions(), min(context.scale.seeds, MAX_SEEDS)
    specs = {}
    for condition, method, init in product(conditions, METHODS, context.levels):
        runs = context.seed_specs(condition, method, paper_setting(context.scale, condition, method), seeds)
        specs[condition, method, init] = [replace(spec, init=init) for spec in runs]
    known = context.run_groups(specs)
    return {c: {m: {init: known[c, m, init] for init in context.levels} for m in METHODS} for c in conditions}


def slopes(accuracies: Sequence[float], values: Sequence[Sequence[float]]) -> list[float]:
    """Return for each seed by how much a value rises with one point of the backbone's accuracy: least squares.

    Args:
        accuracies: of the backbones.
        values: for each backbone one value per seed; NaN for runs that did not finish.

    Example:
        >>> slopes([60.0, 80.0], [[1.0, 4.0], [5.0, math.nan]])
        [0.2, nan]
    """
    rises = []
    for seed in zip(*values, strict=True):
        points = [(x, y) for x, y in zip(accuracies, seed, strict=True) if math.isfinite(y)]
        distinct = len({x for x, _ in points}) > 1
        rises.append(linear_regression(*zip(*points, strict=True)).slope if distinct else math.nan)
    return rises


def _row(name: str, level: float, runs: LevelRuns, init: str, metric: str) -> dict[str, Any]:
    cells = {method: format_mean(runs[method][init], metric) for method in METHODS}
    return {"backbone": name, "its accuracy": level, **cells}


def _unfinished(data: str, runs: LevelRuns) -> list[str]:
    """Return a sentence about the runs that did not finish; empty if all did."""
    statuses = {m: [run.status for seeds in starts.values() for run in seeds] for m, starts in runs.items()}
    counts = {method: len(known) - known.count("finished") for method, known in statuses.items()}
    parts = ", ".join(f"{count} of {len(statuses[name])} with {name}" for name, count in counts.items() if count)
    return [f"{data}: some seeds did not finish: {parts}."] if parts else []


def _change(data: str, levels: Mapping[str, float], runs: LevelRuns) -> str:
    """Say how forgetting changes from the least accurate backbone to the most accurate one, by family."""
    inits = list(levels)
    parts = []
    for family, methods in FAMILIES.items():
        ends = [
            [metric_values(runs[method][init], "forgetting") for init in (inits[-1], inits[0])] for method in methods
        ]
        difference = format_difference(mean_difference(*((strong, weak) for strong, weak in ends)))
        mean = " on average" if len(methods) > 1 else ""
        parts.append(f"{'not known' if difference is None else difference} with {family}{mean}")
    rises = slopes(list(levels.values()), [metric_values(runs["plain"][init], "forgetting") for init in inits])
    finite = [10 * rise for rise in rises if math.isfinite(rise)]
    slope = format_difference(confidence_interval(finite)) if finite else "not known"
    return (
        f"{data}: from the backbone with {levels[inits[0]]:.1f} % to that with {levels[inits[-1]]:.1f} %, forgetting "
        f"changes by {', '.join(parts)} (points, 95 % interval over seeds). Over all {len(levels)} backbones, that of "
        f"plain changes by {slope} for 10 points of the backbone's accuracy."
    )


def _closest(condition: Condition, levels: Mapping[str, float], runs: LevelRuns) -> list[str]:
    """Say from which backbone each method is closest to the paper's cell; empty without numbers of the paper.

    The distance is that of the points (accuracy, forgetting), means over the seeds that finished.
    """
    parts = []
    for method in METHODS:
        cell = published(*condition.where, method)
        means = {init: [seed_interval(runs[method][init], metric) for metric in CELL_METRICS] for init in levels}
        known = {init: [mean.mean for mean in both if mean] for init, both in means.items() if all(both)}
        if cell is None or not known:
            continue
        distances = {init: math.dist(point, (cell.accuracy, cell.forgetting)) for init, point in known.items()}
        nearest = min(distances, key=distances.__getitem__)
        parts.append(f"{method} {levels[nearest]:.1f} % ({distances[nearest]:.1f} points)")
    closest = "accuracy and forgetting come closest to the paper's from the backbone with this accuracy"
    return [f"{condition.data}: {closest} (in brackets: what is left): {', '.join(parts)}."] if parts else []


def _draw(
    trained: Mapping[Condition, LevelRuns], levels: Mapping[str, float], schedules: Mapping[str, str]
) -> list[Drawing]:
    """Draw forgetting and accuracy; lines join the backbones with one schedule of pre-training."""
    figure = Figure(figsize=(WIDTH, 5.6), layout="constrained")
    panels = figure.subplots(len(METRICS), len(trained), squeeze=False, sharex=True)
    for row, metric in zip(panels, METRICS, strict=True):
        for panel, (condition, runs) in zip(row, trained.items(), strict=True):
            _draw_panel(panel, condition, runs, levels, schedules, metric)
        row[0].set_ylabel(f"{metric}, {'points' if metric == 'forgetting' else '%'}")
    for panel, condition in zip(panels[0], trained, strict=True):
        panel.set_title(condition.data, loc="left")
    for panel in panels[-1]:
        panel.set_xlabel("accuracy of the backbone when pre-trained, %")
    handles = dict(zip(*reversed(panels[0][0].get_legend_handles_labels()), strict=True))
    columns = [name for pair in zip(PENALTIES, (*EXPLICIT, "plain"), strict=True) for name in pair]
    figure.legend([handles[name] for name in columns], columns, loc="outside upper center", ncols=len(PENALTIES))
    data = ", ".join(condition.data for condition in trained)
    names = dict(zip(dict.fromkeys(schedules.values()), MARKERS, strict=False))
    shapes = ", ".join(f"{MARKERS[marker]} for {name or 'no recorded schedule'}" for name, marker in names.items())
    return [
        Drawing(
            "accuracy",
            "Forgetting and accuracy by backbone",
            "Forgetting (above) and accuracy (below) of runs that start from backbones of different accuracies, at the "
            "paper's settings: mean over seeds with its 95 % interval, cut off at the edge of the panel. Lines join "
            f"backbones with the same schedule of pre-training ({shapes}). Triangles at the right edge are the paper's "
            "numbers, hollow ones those of penalties.",
            f"Line charts: forgetting and accuracy of {', '.join(METHODS)} by the backbone's accuracy, on {data}.",
            figure,
        )
    ]


def _draw_panel(
    panel: Axes,
    condition: Condition,
    runs: LevelRuns,
    levels: Mapping[str, float],
    schedules: Mapping[str, str],
    metric: str,
) -> None:
    """Draw a line for each method and schedule, with the colour of the importance and the style of the family."""
    importances = ("plain", *PENALTIES)
    drawn: list[float] = []
    for method in METHODS:
        index = importances.index(method.removeprefix("explicit-"))
        colour = LINES[index - 1] if index else INK
        penalty = method in PENALTIES
        heights: list[float] = []
        for schedule, marker in zip(dict.fromkeys(schedules.values()), MARKERS, strict=False):
            same = [init for init in levels if schedules[init] == schedule]
            intervals = [(levels[init], seed_interval(runs[method][init], metric)) for init in same]
            points = [(level, interval.within(0, 100)) for level, interval in intervals if interval]
            means = [interval.mean for _, interval in points]
            line: Any = {"color": colour, "label": method, "marker": marker, "ms": 2.5}
            panel.plot([x for x, _ in points], means, "--" if penalty else "-", **line)
            heights += means
            for level, interval in points:
                if not math.isnan(interval.low):
                    panel.vlines(level, interval.low, interval.high, color=colour, lw=0.8, alpha=0.4)
        if cell := published(*condition.where, method):
            heights.append(getattr(cell, metric))
            look: Any = {"color": colour, "mfc": "none" if penalty else colour, "ms": 4, "mew": 0.8}
            panel.plot(0.99, heights[-1], "<", transform=panel.get_yaxis_transform(), **look)
        drawn += heights
    if drawn:
        margin = 0.08 * (max(drawn) - min(drawn)) or 0.5
        panel.set_ylim(min(drawn) - margin, max(drawn) + margin)
    panel.margins(x=0.07)
    panel.grid(axis="y")
