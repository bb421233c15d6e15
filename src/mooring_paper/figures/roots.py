"""The root in R: the paper's square root, the cube root and the plain ratio of importances."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from matplotlib.figure import Figure

from mooring_lab.model.metrics import confidence_interval
from mooring_lab.model.results import Result
from mooring_lab.report.picture import Drawing
from mooring_lab.report.style import LINES, WIDTH
from mooring_paper.context.paper_context import MethodRuns, PaperContext, all_runs, train_methods
from mooring_paper.context.scale import EXPLICIT
from mooring_paper.context.seed_statistics import (
    format_difference,
    format_mean,
    mean_difference,
    metric_values,
)
from mooring_paper.context.target_result import ResultTable, TargetResult

ROOTS = {"square root": "", "cube root": "-cube", "plain ratio": "-ratio"}
"""The suffix of the methods with each root."""

METHODS = {f"{name}{suffix}": name for name in EXPLICIT for suffix in ROOTS.values()}
"""Every method with every root, and the method whose setting it uses."""


def train_roots(context: PaperContext) -> MethodRuns:
    """Return the runs of every root, each at the paper's setting of the explicit step with the same importance."""
    return train_methods(context, METHODS)


def run(context: PaperContext) -> TargetResult:
    """Compare accuracy and forgetting of every root with the plain ratio, by seed."""
    runs = train_roots(context)
    tables = []
    for data, methods in runs.items():
        rows = [_row(name, root, methods) for name in EXPLICIT for root in ROOTS]
        tables.append(ResultTable(f"{data}: the root in the explicit step", list(rows[0]), rows))
    return TargetResult("roots", (), tables, all_runs(runs), partial(_draw, runs))


def _row(name: str, root: str, methods: Mapping[str, Sequence[Result]]) -> dict[str, Any]:
    results, ratio = (methods[f"{name}{ROOTS[r]}"] for r in (root, "plain ratio"))
    reduction = mean_difference((metric_values(ratio, "forgetting"), metric_values(results, "forgetting")))
    return {
        "method": name,
        "root": root,
        "lr": f"{results[0].spec.lr:g}",
        "accuracy": format_mean(results, "accuracy"),
        "forgetting": format_mean(results, "forgetting"),
        "forgets less than the plain ratio by": None if root == "plain ratio" else format_difference(reduction),
    }


def _draw(runs: MethodRuns) -> list[Drawing]:
    values = {
        (data, name): finite
        for data, methods in runs.items()
        for name, results in methods.items()
        if (finite := [value for value in metric_values(results, "forgetting") if math.isfinite(value)])
    }
    if not values:
        return []
    figure = Figure(figsize=(WIDTH, 2.8), layout="constrained")
    panels = figure.subplots(1, len(runs), squeeze=False, sharey=True)[0]
    for panel, data in zip(panels, runs, strict=True):
        for index, (root, suffix) in enumerate(ROOTS.items()):
            for position, name in enumerate(EXPLICIT):
                if seeds := values.get((data, f"{name}{suffix}")):
                    x = position + 0.2 * (index - 1)
                    panel.plot([x] * len(seeds), seeds, ".", color=LINES[index], alpha=0.6, ms=5, mew=0)
                    panel.plot(x, confidence_interval(seeds).mean, "_", color=LINES[index], ms=10, mew=2)
            panel.plot([], [], "_", color=LINES[index], ms=10, mew=2, label=root)
        panel.set_title(data, loc="left")
        panel.set_xticks(range(len(EXPLICIT)), EXPLICIT)
        panel.grid(axis="y")
    panels[0].set_ylabel("forgetting, points")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper right", ncols=len(ROOTS))
    return [
        Drawing(
            "forgetting",
            "The root in the explicit step",
            "Forgetting with the square root, the cube root and the plain ratio of importances in R: a dash for the "
            "mean over seeds, a dot for each seed. Lower is better.",
            f"Forgetting of {', '.join(EXPLICIT)} with each of {', '.join(ROOTS)}, on {', '.join(runs)}.",
            figure,
        )
    ]
