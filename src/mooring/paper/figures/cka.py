"""Likeness by layer to the model after the first task: does balanced importance keep deep layers, and forget less?"""

import math
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from mooring.lab.model.metrics import Interval, confidence_interval, paired_difference
from mooring.lab.model.results import Result
from mooring.paper.context.context import Laboratory
from mooring.paper.context.result import Finding, Table
from mooring.paper.context.scale import REGULARIZERS, Scale
from mooring.paper.context.seed_rows import first_cases
from mooring.paper.figures.importance_by_layer import Line, Runs, draw_lines, span, train, unfinished
from mooring.paper.tables.grid_search import found_settings, search

if TYPE_CHECKING:
    from mooring.report.picture import Drawing

__all__ = ["METHODS", "count", "run", "runs_of"]

LIKE = {
    "plain": "plain",
    **{name: name for name in (*REGULARIZERS, "uniform", "random")},
    **{f"balanced-{name}": name for name in REGULARIZERS},
}
"""Every method, and the one whose setting it takes: balancing leaves the mean importance as it was."""

METHODS = tuple(LIKE)
REFERENCES = ("uniform", "random", "plain")


def count(scale: Scale) -> int:
    """How many models it trains.

    Example:
        >>> from mooring.paper.context.scale import PAPER
        >>> count(PAPER)  # 11 methods, 5 seeds, 3 data sets
        165
    """
    return len(METHODS) * scale.seeds * len(scale.streams)


def runs_of(lab: Laboratory) -> Runs:
    """Every method on every data set, each at the setting that our search finds, as in the main table."""
    found = search(lab, first_cases(lab.scale), tuple(dict.fromkeys(LIKE.values())))
    return train(lab, LIKE, {case: found_settings(choices) for case, choices in found.items()})


def run(lab: Laboratory) -> Finding:
    """CKA by layer of every method, and each balanced form beside its plain form."""
    runs = runs_of(lab)
    tables, text = [], []
    for data, methods in runs.items():
        rows = [_row(name, results) for name, results in methods.items()]
        tables.append(Table(f"{data}: CKA to the model after the first task", _columns(rows), rows))
        compared = [_compared(name, methods[name], methods[f"balanced-{name}"]) for name in REGULARIZERS]
        tables.append(Table(f"{data}: balanced minus its plain form, seed by seed", list(compared[0]), compared))
        text += [*_said(data, compared), *unfinished(data, methods)]
    results = [result for methods in runs.values() for found in methods.values() for result in found]
    return Finding("fig-cka", text, tables, results, partial(_draw, runs))


def deep(result: Result) -> float:
    """Mean CKA over the deeper half of the layers; not a number where a run did not finish.

    Example:
        >>> from mooring.lab.model.spec import RunSpec
        >>> deep(Result(RunSpec("digits", "0", "ewc", 0), "finished", "", [], [], cka={"1": 1.0, "2": 0.8, "3": 0.4}))
        0.4
    """
    values = list(result.cka.values()) if result.status == "finished" else []
    kept = values[math.ceil(len(values) / 2) :] or values
    return math.fsum(kept) / len(kept) if kept else math.nan


def by_layer(results: Sequence[Result]) -> dict[str, Interval]:
    """CKA of each layer over the seeds that finished."""
    found: dict[str, list[float]] = {}
    for result in results:
        for layer, value in (result.cka if result.status == "finished" else {}).items():
            if math.isfinite(value):
                found.setdefault(layer, []).append(value)
    return {layer: confidence_interval(values) for layer, values in found.items()}


def difference(values: Sequence[float], baseline: Sequence[float]) -> Interval | None:
    """The paired difference over the seeds that both have; None where there is none.

    Example:
        >>> difference([1.0, math.nan, 3.0], [0.0, 1.0, 1.0]).mean
        1.5
    """
    both = [(v, b) for v, b in zip(values, baseline, strict=True) if math.isfinite(v) and math.isfinite(b)]
    return paired_difference([v for v, _ in both], [b for _, b in both]) if both else None


def bounded(found: Interval | None, form: str = "+.2f") -> str | None:
    """A difference with its interval, where there are enough seeds for one.

    Example:
        >>> bounded(confidence_interval([1.0, 2.0, 3.0]))
        '+2.00 (-0.48 to +4.48)'
    """
    if found is None:
        return None
    low = "" if math.isnan(found.low) else f" ({found.low:{form}} to {found.high:{form}})"
    return f"{found.mean:{form}}{low}"


def metric(results: Sequence[Result], name: str) -> list[float]:
    """A metric of each run."""
    return [result.metrics[name] for result in results]


def mean_over_seeds(results: Sequence[Result], name: str) -> str | None:
    """A metric over the seeds that finished."""
    values = [value for value in metric(results, name) if math.isfinite(value)]
    return str(confidence_interval(values)) if values else None


def _row(name: str, results: Sequence[Result]) -> dict[str, Any]:
    spec = results[0].spec
    told: dict[str, Any] = {"method": name, "lr": f"{spec.lr:g}"}
    told["strength"] = None if spec.strength is None else f"{spec.strength:g}"
    told |= {which: mean_over_seeds(results, which) for which in ("accuracy", "forgetting")}
    return told | {layer: f"{found.mean:.3f}" for layer, found in by_layer(results).items()}


def _columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(column for row in rows for column in row))


def _compared(name: str, plain: Sequence[Result], balanced: Sequence[Result]) -> dict[str, Any]:
    """In the deeper half of the layers, and in what is forgotten; a sign is sure where the 95 % interval has no 0."""
    cka = difference([deep(result) for result in balanced], [deep(result) for result in plain])
    forgetting = difference(metric(balanced, "forgetting"), metric(plain, "forgetting"))
    return {
        "importance": name,
        "deep CKA": bounded(cka, "+.2g"),
        "deep CKA is higher": None if cka is None else cka.mean > 0,
        "surely higher": None if cka is None or math.isnan(cka.low) else cka.low > 0,
        "forgetting": bounded(forgetting),
        "forgets less": None if forgetting is None else forgetting.mean < 0,
        "surely less": None if forgetting is None or math.isnan(forgetting.low) else forgetting.high < 0,
    }


def _said(data: str, compared: Sequence[Mapping[str, Any]]) -> list[str]:
    def named(column: str, surely: str) -> str:
        known = [row for row in compared if row[column] is not None]
        those = [row["importance"] for row in known if row[column]]
        sure = f" ({', '.join(those)}), {sum(bool(row[surely]) for row in known)} of them beyond the 95 % interval"
        return f"{len(those)} of {len(known)} definitions" + (sure if those else "")

    return [
        f"{data}: balanced importance keeps the deeper half of the layers more alike for "
        f"{named('deep CKA is higher', 'surely higher')}; it forgets less for {named('forgets less', 'surely less')}. "
        "Each balanced form has the learning rate and strength of its plain form."
    ]


def _absent(methods: Collection[str], layers: Collection[str]) -> str:
    missing = [name for name in methods if name not in layers]
    return f" No seed of {', '.join(missing)} finished." if missing else ""


def _draw(runs: Mapping[str, Mapping[str, Sequence[Result]]]) -> list["Drawing"]:
    from matplotlib.figure import Figure  # slow to import

    from mooring.report.picture import Drawing
    from mooring.report.style import WIDTH

    drawings = []
    for data, methods in runs.items():
        layers = {name: found for name, results in methods.items() if (found := by_layer(results))}
        if not any(name in layers for name in REGULARIZERS):
            continue
        figure = Figure(figsize=(WIDTH, 4.6), layout="constrained")
        panels = figure.subplots(2, 2, sharex=True, sharey=True)
        bounds = span([Line(name, found) for name, found in layers.items()])
        for panel, name in zip(panels.flat, REGULARIZERS, strict=True):
            pair = (f"balanced-{name}", name)
            chosen = [each for each in (*pair, *REFERENCES) if each in layers]
            panel.set_title(name, loc="left")
            styles = {each: "-" if each in pair else ":" for each in chosen}
            places = {each: place for place, each in enumerate((*pair, *REFERENCES))}
            draw_lines(panel, [Line(each, layers[each], styles[each], places[each]) for each in chosen], bounds)
        for panel in panels.flat:
            panel.set_ylabel("CKA")
            panel.label_outer()
        drawings.append(
            Drawing(
                f"{data}-layers",
                f"Likeness to the model after the first task, by layer: {data}",
                "Debiased linear CKA between the final model and the model after the first task; 1 where a layer still "
                "says the same. A panel for each importance, plain and balanced, beside what has every layer alike "
                "(uniform, random) and what is not held (plain). Mean over seeds with its 95 % interval, cut off where "
                f"the panel ends.{_absent(methods, layers)}",
                f"Line charts: CKA by layer for {', '.join(layers)}, on {data}.",
                figure,
            )
        )
    return drawings
