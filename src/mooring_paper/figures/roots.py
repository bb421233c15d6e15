"""The root in R: the paper's square root, the cube root and the plain ratio of importances."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

from mooring_lab.model.metrics import SCORE_TOLERANCE, Interval, confidence_interval
from mooring_lab.model.results import Result
from mooring_paper.context.paper_context import MethodRuns, PaperContext, train_methods
from mooring_paper.context.scale import EXPLICIT
from mooring_paper.context.seed_statistics import (
    format_difference,
    format_mean,
    mean_difference,
    metric_values,
    unfinished_note,
)
from mooring_paper.context.target_result import ResultTable, TargetResult

if TYPE_CHECKING:
    from mooring_lab.report.picture import Drawing

ROOTS = {"square root": "", "cube root": "-cube", "plain ratio": "-ratio"}
"""The suffix of the methods with each root."""

METHODS = {f"{name}{suffix}": name for name in EXPLICIT for suffix in ROOTS.values()}
"""Every method with every root, and the method whose setting it uses."""

Reductions = Mapping[tuple[str, str], Interval | None]
"""How much less than the plain ratio a root forgets, by method and root."""


def train_roots(context: PaperContext) -> MethodRuns:
    """Return the runs of every root, each at the paper's setting of the explicit step with the same importance."""
    return train_methods(context, METHODS)


def run(context: PaperContext) -> TargetResult:
    """Compare accuracy and forgetting of every root with the plain ratio, by seed."""
    runs = train_roots(context)
    tables, text = [], []
    for data, methods in runs.items():
        rows = []
        reductions: dict[tuple[str, str], Interval | None] = {}
        for name in EXPLICIT:
            ratio = metric_values(methods[f"{name}{ROOTS['plain ratio']}"], "forgetting")
            for root, suffix in ROOTS.items():
                results = methods[f"{name}{suffix}"]
                if root != "plain ratio":
                    reductions[name, root] = mean_difference((ratio, metric_values(results, "forgetting")))
                rows.append(_row(name, root, results, reductions.get((name, root))))
        tables.append(ResultTable(f"{data}: the root in the explicit step", list(rows[0]), rows))
        text += [_sentence(data, root, reductions) for root in ("square root", "cube root")]
        text += unfinished_note(data, methods)
    results = [result for methods in runs.values() for seeds in methods.values() for result in seeds]
    return TargetResult("roots", text, tables, results, partial(_draw, runs))


def _row(name: str, root: str, results: Sequence[Result], reduction: Interval | None) -> dict[str, Any]:
    return {
        "method": name,
        "root": root,
        "lr": f"{results[0].spec.lr:g}",
        "accuracy": format_mean(results, "accuracy"),
        "forgetting": format_mean(results, "forgetting"),
        "forgets less than the plain ratio by": format_difference(reduction),
    }


def _sentence(data: str, root: str, reductions: Reductions) -> str:
    known = [value for (_, tested), value in reductions.items() if tested == root and value is not None]
    if not known:
        return f"{data}: no seed finished with both the {root} and the plain ratio."
    mean = fmean(value.mean for value in known)
    less = sum(value.mean > SCORE_TOLERANCE for value in known)
    significant = sum(value.low > 0 for value in known if not math.isnan(value.low))
    change = f"{abs(mean):.2f} points {'higher' if mean < 0 else 'lower'}" if abs(mean) >= 0.005 else "the same"
    paper = "; the paper reports about 1 to 2 points lower" if root == "square root" else ""
    return (
        f"{data}: the {root} forgets less than the plain ratio for {less} of {len(known)} definitions, {significant} "
        f"of them beyond the 95 % interval; the mean forgetting over definitions is {change}{paper}."
    )


def _draw(runs: MethodRuns) -> list["Drawing"]:
    from matplotlib.figure import Figure  # slow to import

    from mooring_lab.report.picture import Drawing
    from mooring_lab.report.style import LINES, WIDTH

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
