"""The root in R: the paper's square root beside the cube root and the plain ratio of importances."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from mooring.lab.model.metrics import SCORE_TOLERANCE, Interval, confidence_interval
from mooring.lab.model.results import Result
from mooring.paper.context.context import Laboratory
from mooring.paper.context.result import Finding, Table
from mooring.paper.context.scale import EXPLICIT, Scale
from mooring.paper.figures.cka import bounded, difference, mean_over_seeds, metric
from mooring.paper.figures.importance_by_layer import train, unfinished

if TYPE_CHECKING:
    from mooring.report.picture import Drawing

__all__ = ["LIKE", "ROOTS", "count", "run"]

ROOTS = {"square root": "", "cube root": "-cube", "plain ratio": "-ratio"}
"""How each is called, and how the names of its methods end."""

LIKE = {f"{name}{ending}": name for name in EXPLICIT for ending in ROOTS.values()}
"""Every method, and the one whose setting in the paper it takes."""


def count(scale: Scale) -> int:
    """How many models it trains.

    Example:
        >>> from mooring.paper.context.scale import PAPER
        >>> count(PAPER)  # 3 roots, 4 definitions, 5 seeds, 3 data sets
        180
    """
    return len(ROOTS) * len(EXPLICIT) * scale.seeds * len(scale.streams)


def run(lab: Laboratory) -> Finding:
    """Accuracy and forgetting of every root, and each beside the plain ratio, seed by seed."""
    runs = train(lab, LIKE)
    tables, text = [], []
    for data, methods in runs.items():
        rows, less = [], {}
        for name in EXPLICIT:
            for root, ending in ROOTS.items():
                found = methods[f"{name}{ending}"]
                less[name, root] = _less(found, methods[f"{name}{ROOTS['plain ratio']}"])
                rows.append(_row(name, root, found, less[name, root] if ending != ROOTS["plain ratio"] else None))
        tables.append(Table(f"{data}: the root in the explicit step", list(rows[0]), rows))
        text += [*(_said(data, root, less) for root in ("square root", "cube root")), *unfinished(data, methods)]
    results = [result for methods in runs.values() for found in methods.values() for result in found]
    return Finding("roots", text, tables, results, partial(_draw, runs))


def _less(found: Sequence[Result], ratio: Sequence[Result]) -> Interval | None:
    """What it forgets less than the plain ratio."""
    return difference(metric(ratio, "forgetting"), metric(found, "forgetting"))


def _row(name: str, root: str, found: Sequence[Result], less: Interval | None) -> dict[str, Any]:
    told: dict[str, Any] = {"method": name, "root": root, "lr": f"{found[0].spec.lr:g}"}
    told |= {which: mean_over_seeds(found, which) for which in ("accuracy", "forgetting")}
    return {**told, "forgets less than the plain ratio by": bounded(less)}


def _said(data: str, root: str, less: Mapping[tuple[str, str], Interval | None]) -> str:
    """How many definitions the root helps."""
    known = [told for (_, which), told in less.items() if which == root and told is not None]
    if not known:
        return f"{data}: no seed of the {root} finished beside one of the plain ratio."
    mean = math.fsum(told.mean for told in known) / len(known)
    fewer = sum(told.mean > SCORE_TOLERANCE for told in known)
    sure = sum(told.low > 0 for told in known if not math.isnan(told.low))
    more = f"{abs(mean):.2f} points {'higher' if mean < 0 else 'lower'}" if abs(mean) >= 0.005 else "the same"
    paper = "; the paper says about 1 to 2 lower" if root == "square root" else ""
    return (
        f"{data}: the {root} forgets less than the plain ratio for {fewer} of {len(known)} definitions, {sure} of "
        f"them beyond the 95 % interval; in the mean over definitions forgetting is {more}{paper}."
    )


def _draw(runs: Mapping[str, Mapping[str, Sequence[Result]]]) -> list["Drawing"]:
    from matplotlib.figure import Figure  # slow to import

    from mooring.report.picture import Drawing
    from mooring.report.style import LINES, WIDTH

    values = {
        (data, name): known
        for data, methods in runs.items()
        for name, results in methods.items()
        if (known := [value for value in metric(results, "forgetting") if math.isfinite(value)])
    }
    if not values:
        return []
    figure = Figure(figsize=(WIDTH, 2.8), layout="constrained")
    panels = figure.subplots(1, len(runs), squeeze=False, sharey=True)[0]
    for panel, data in zip(panels, runs, strict=True):
        for number, (root, ending) in enumerate(ROOTS.items()):
            for place, name in enumerate(EXPLICIT):
                if seeds := values.get((data, f"{name}{ending}")):
                    x = place + 0.2 * (number - 1)
                    panel.plot([x] * len(seeds), seeds, ".", color=LINES[number], alpha=0.6, ms=5, mew=0)
                    panel.plot(x, confidence_interval(seeds).mean, "_", color=LINES[number], ms=10, mew=2)
            panel.plot([], [], "_", color=LINES[number], ms=10, mew=2, label=root)
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
