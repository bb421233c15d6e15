"""Importance by layer: do the definitions say less of deeper layers? And what the figures by layer share."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from statistics import correlation
from typing import TYPE_CHECKING, Any

from mooring.lab.methods import find_method
from mooring.lab.model.metrics import Interval, confidence_interval
from mooring.lab.model.plurals import pluralize
from mooring.lab.model.results import Result
from mooring.paper.context.context import Laboratory
from mooring.paper.context.result import Finding, Table
from mooring.paper.context.scale import REGULARIZERS, Case, Scale
from mooring.paper.context.seed_rows import first_cases
from mooring.paper.published.published_numbers import Setting, published_setting

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from mooring.report.picture import Drawing

__all__ = [
    "Line",
    "Runs",
    "count",
    "draw_lines",
    "rank_correlation",
    "relative",
    "run",
    "setting",
    "span",
    "train",
    "unfinished",
]

Runs = dict[str, dict[str, list[Result]]]
"""Results of each data set and method, one for each seed."""


def count(scale: Scale) -> int:
    """How many models it trains.

    Example:
        >>> from mooring.paper.context.scale import PAPER
        >>> count(PAPER)  # 4 definitions, 5 seeds, 3 data sets
        60
    """
    return len(REGULARIZERS) * scale.seeds * len(scale.streams)


def run(lab: Laboratory) -> Finding:
    """Mean importance by layer, relative to the mean layer of the run."""
    runs = train(lab, {name: name for name in REGULARIZERS})
    tables, text = [], []
    lines: dict[str, dict[str, dict[str, Interval]]] = {}
    for data, methods in runs.items():
        lines[data] = {name: relative(results) for name, results in methods.items()}
        rows, orders = [], {}
        for name, layers in lines[data].items():
            means = [found.mean for found in layers.values()]
            orders[name] = rank_correlation(list(range(len(means))), means)
            ratio = 10 ** (means[-1] - means[0]) if means else None
            row: dict[str, Any] = {"importance": name, **{layer: _written(told) for layer, told in layers.items()}}
            rows.append({**row, "last / first": ratio, "rank correlation with depth": orders[name]})
        columns = list(dict.fromkeys(column for row in rows for column in row))
        tail = ["last / first", "rank correlation with depth"]
        columns = [column for column in columns if column not in tail] + tail
        tables.append(Table(f"{data}: mean importance by layer, the mean layer being 1", columns, rows))
        text += _said(data, lines[data], orders, methods)
    results = [result for methods in runs.values() for found in methods.values() for result in found]
    return Finding("fig-importance", text, tables, results, partial(_draw, lines))


def setting(scale: Scale, case: Case, method: str, like: str) -> Setting:
    """The paper's learning rate and strength for a method; without any, the scale's first and the method's own.

    Args:
        scale: whose first learning rate is taken where the paper has none.
        case: network, regime and data set.
        method: what is trained.
        like: the method whose setting in the paper it takes: itself, or one that it is a variant of.
    """
    told = published_setting(case.network, case.regime.name, case.data, like)
    if told is None:
        return Setting(scale.lrs[0], find_method(method).strength)
    return Setting(told.lr, told.strength if find_method(method).has_strength else None)


def train(
    lab: Laboratory, methods: Mapping[str, str], settings: Mapping[Case, Mapping[str, Setting]] | None = None
) -> Runs:
    """The runs of methods on every data set, in the first regime, all trained together.

    Args:
        lab: trains them.
        methods: for each, the method whose setting it takes.
        settings: of methods in each case; the paper's where there are none.
    """
    scale = lab.scale
    specs = {}
    for case in first_cases(scale):
        for method, like in methods.items():
            ours = (settings or {}).get(case, {}).get(like)
            told = setting(scale, case, method, like) if ours is None else ours
            specs[case.data, method] = [lab.spec(case, method, seed, told) for seed in range(scale.seeds)]
    found = lab.run([spec for some in specs.values() for spec in some])
    return {
        data: {method: [found[spec] for spec in specs[data, method]] for method in methods} for data in scale.streams
    }


def relative(results: Sequence[Result]) -> dict[str, Interval]:
    """log10 of each layer's importance relative to the mean over the layers of its run, over the seeds that finished.

    In logarithms, since layers differ by orders of magnitude. A layer without any importance has no logarithm and is
    left out.

    Example:
        >>> from mooring.lab.model.spec import RunSpec
        >>> spec = RunSpec("digits", "0", "ewc", 0)
        >>> {layer: round(10**told.mean, 2) for layer, told in relative(
        ...     [Result(spec, "finished", "", [], [], importance={"first": 9.0, "last": 1.0})]).items()}
        {'first': 1.8, 'last': 0.2}
    """
    logs: dict[str, list[float]] = {}
    for result in results:
        layers = result.importance if result.status == "finished" else {}
        mean = math.fsum(layers.values()) / len(layers) if layers else 0.0
        for layer, value in layers.items():
            if value > 0 and 0 < mean < math.inf:
                logs.setdefault(layer, []).append(math.log10(value / mean))
    return {layer: confidence_interval(values) for layer, values in logs.items()}


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Spearman's: the correlation of ranks; None where there is nothing to order.

    Example:
        >>> rank_correlation([0, 1, 2], [9.0, 3.0, 1.0]), rank_correlation([0, 1], [2.0, 2.0])
        (-1.0, None)
    """
    if len(set(one)) < 2 or len(set(other)) < 2:
        return None
    return correlation(_ranks(one), _ranks(other))


def _ranks(values: Sequence[float]) -> list[float]:
    """Those of equal values are their mean."""
    return [sum(v < value for v in values) + (sum(v == value for v in values) - 1) / 2 for value in values]


def _written(told: Interval) -> str:
    low = "" if math.isnan(told.low) else f" ({10**told.low:.2g} to {10**told.high:.2g})"
    return f"{10**told.mean:.3g}{low}"


def _said(
    data: str,
    lines: Mapping[str, Mapping[str, Interval]],
    orders: Mapping[str, float | None],
    methods: Mapping[str, Sequence[Result]],
) -> list[str]:
    text = []
    known = {name: order for name, order in orders.items() if order is not None}
    if known:
        fewer = [name for name, order in known.items() if order < 0]
        told = ", ".join(f"{name} {order:+.2f}" for name, order in known.items())
        named = f" ({', '.join(fewer)})" if fewer else ""
        layers = max(len(lines[name]) for name in known)
        text.append(
            f"{data}: mean importance falls with depth for {len(fewer)} of {len(known)} definitions{named}; "
            f"rank correlation over {pluralize(layers, 'layer')}: {told}."
        )
        ends = {name: [found.mean for found in lines[name].values()] for name in known}
        shares = {name: 10 ** (means[-1] - means[0]) for name, means in ends.items()}
        least = min(shares, key=shares.__getitem__)
        text.append(
            f"{data}: the last layer has least of the first's importance with {least}: {shares[least]:.2g} of it."
        )
    return [*text, *unfinished(data, methods)]


def unfinished(data: str, methods: Mapping[str, Sequence[Result]]) -> list[str]:
    """A sentence on the runs that did not finish, where there are any."""
    broken = {name: sum(result.status != "finished" for result in found) for name, found in methods.items()}
    told = ", ".join(f"{number} of {len(methods[name])} with {name}" for name, number in broken.items() if number)
    return [f"{data}: not all seeds finished; those that did not: {told}."] if told else []


def _draw(lines: Mapping[str, Mapping[str, Mapping[str, Interval]]]) -> list["Drawing"]:
    from matplotlib.figure import Figure  # slow to import

    from mooring.report.figures.logarithm import ticks
    from mooring.report.picture import Drawing
    from mooring.report.style import WIDTH

    shown = {data: methods for data, methods in lines.items() if any(methods.values())}
    if not shown:
        return []
    figure = Figure(figsize=(WIDTH, 0.75 + 2.6 * len(shown)), layout="constrained")
    panels = figure.subplots(len(shown), 1, squeeze=False)[:, 0]
    for panel, (data, methods) in zip(panels, shown.items(), strict=True):
        panel.set_title(data, loc="left")
        panel.set_ylabel("importance / mean layer's")
        drawn = [Line(n, layers, colour=REGULARIZERS.index(n)) for n, layers in methods.items() if layers]
        low, high = span(drawn)
        low, high = min(low, -0.5), max(high, 0.5)  # a decade at least: less is not a difference
        draw_lines(panel, drawn, (low, high))
        panel.set_yticks(list(found := ticks(low, high)), list(found.values()))
    return [
        Drawing(
            "layers",
            "Importance by layer",
            "Mean importance of each layer's parameters over past tasks, at the end, relative to the mean layer of the "
            "same run; layers from the input to the output. Geometric mean over seeds with its 95 % interval, "
            "logarithmic scale; intervals end where the panel does.",
            f"Line charts: relative importance by layer for {', '.join(REGULARIZERS)}, on {', '.join(shown)}.",
            figure,
        )
    ]


@dataclass(frozen=True)
class Line:
    """A measure by layer, to be drawn.

    Attributes:
        name: what is written at its end.
        layers: the interval of each layer, by name.
        style: of matplotlib.
        colour: a place in the house's colours; by default the line's own place.
    """

    name: str
    layers: Mapping[str, Interval]
    style: str = "-"
    colour: int | None = None


def _shared(layers: Sequence[str]) -> str:
    """What all names begin with, up to a dot.

    Example:
        >>> _shared(["backbone.1", "backbone.12"])
        'backbone.'
    """
    owners = [layer.split(".")[:-1] for layer in layers]
    shared = takewhile(lambda parts: len(set(parts)) == 1, zip(*owners, strict=False))
    return "".join(f"{parts[0]}." for parts in shared)


def span(lines: Sequence[Line]) -> tuple[float, float]:
    """The lowest and the highest mean, and some room."""
    means = [told.mean for line in lines for told in line.layers.values()]
    margin = 0.15 * (max(means) - min(means)) or 0.05
    return min(means) - margin, max(means) + margin


def draw_lines(panel: "Axes", lines: Sequence[Line], bounds: tuple[float, float] | None = None) -> None:
    """Lines over layers with their intervals, each named at its end; by default the means decide how high it is."""
    from mooring.report.figures.labels import apart
    from mooring.report.style import INK, LINES

    layers = list(dict.fromkeys(layer for line in lines for layer in line.layers))
    low, high = bounds or span(lines)
    panel.set_ylim(low, high)
    shared = _shared(layers)
    panel.set_xticks(range(len(layers)), [layer[len(shared) :] for layer in layers])
    panel.set_xlabel(f"layer of {shared.rstrip('.')}" if shared else "layer")
    panel.set_xlim(-0.1, len(layers) - 0.9)
    panel.grid(axis="y")
    ends = []
    for number, line in enumerate(lines):
        colour = LINES[(number if line.colour is None else line.colour) % len(LINES)]
        x = [layers.index(layer) for layer in line.layers]
        y = [told.mean for told in line.layers.values()]
        panel.plot(x, y, line.style, marker="o", ms=2.5, color=colour)
        for place, told in zip(x, line.layers.values(), strict=True):
            if not math.isnan(told.low):
                # beside each other, where lines have their intervals at the same layer
                x_of_bar = place + 0.006 * len(layers) * (number - (len(lines) - 1) / 2)
                panel.vlines(x_of_bar, told.low, told.high, color=colour, lw=0.8, alpha=0.5)
        ends.append((y[-1], colour))
    heights = apart([(end - low) / (high - low) for end, _ in ends], 0.075, 1.0)
    for line, (_, colour), up in zip(lines, ends, heights, strict=True):
        beside: Any = {"xycoords": "axes fraction", "textcoords": "offset points", "va": "center_baseline", "size": 7}
        panel.annotate("●", (1.0, up), (6, 0), color=colour, **beside)
        panel.annotate(line.name, (1.0, up), (15, 0), color=INK, **beside)
