"""Case 2 of instability, lr * strength * importance >= 1: violations of the bound, instability and clamping."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from mooring_lab.model.results import Result, Stability
from mooring_lab.model.spec import RunSpec
from mooring_lab.model.summary import Row
from mooring_lab.report.logarithm import ticks
from mooring_lab.report.picture import Drawing
from mooring_lab.report.style import FAINT, LINES, PAPER, RULE, WIDTH
from mooring_paper.context.paper_context import PaperContext, paper_setting, unique_runs
from mooring_paper.context.scale import REGULARIZERS, Condition
from mooring_paper.context.seed_statistics import metric_values, summarize_seeds, unstable_count
from mooring_paper.context.target_result import ResultTable, TargetResult
from mooring_paper.figures.panels import draw_stability_marks
from mooring_paper.published.published_numbers import Setting, published_violations

CLAMPED = "clamped-"
"""The prefix of clamped methods."""

MAX_SEEDS = 3
"""Seeds of each strength: a finer grid of strengths says more about where training breaks than more seeds."""

MAX_STRENGTHS_PER_DECADE = 4
DECADES_BELOW, DECADES_ABOVE = 1, 2
"""The range of strengths around the first violation."""

ACCURACY_DROP = 10.0
"""Points of accuracy by which a finished run must be below its clamped run to count as degraded."""


def strength_grid(first_violation: float, per_decade: int) -> list[float]:
    """Return strengths around that of the first violation: powers of ten and steps between them, with three digits.

    The grid does not depend on the last digits of the measured strength, so that every machine trains the same runs.

    Example:
        >>> strength_grid(73.1, 2)
        [3.16, 10.0, 31.6, 100.0, 316.0, 1000.0, 3160.0]
    """
    start = math.floor(per_decade * math.log10(first_violation))
    steps = range(start - per_decade * DECADES_BELOW, start + per_decade * DECADES_ABOVE + 1)
    return [float(f"{10 ** (k / per_decade):.3g}") for k in steps]


# The metrics of a run: a violation is a parameter with lr * strength * importance >= 1.


def _violation_count(stability: Stability) -> int:
    """Return how many parameters violate the bound; those with negative importance are Case 1."""
    return stability.extrapolate + stability.diverge - stability.negative


def violations_after_first_task(result: Result) -> int:
    """Return how many parameters violate the bound after the first task; 0 if training broke during it."""
    return sum(map(_violation_count, result.stability[:1]))


def violated_after_any_task(result: Result) -> bool:
    """Return whether a parameter violated the bound after any task that the run finished."""
    return any(map(_violation_count, result.stability))


def unstable_under_penalty(result: Result) -> bool:
    """Return whether a run became unstable after the first task, when the penalty acts."""
    return result.status == "unstable" and bool(result.stability)


def parameter_count(stability: Stability) -> int:
    """Return how many parameters the stability covers."""
    return stability.free + stability.interpolate + stability.extrapolate + stability.diverge


def _broke(row: Row) -> bool:
    return any(map(unstable_under_penalty, row.results))


def _known_stability(row: Row) -> list[Stability]:
    """Return the stability after the first task of the runs that finished it."""
    return [stability for result in row.results for stability in result.stability[:1]]


def _violation_percentage(row: Row) -> float:
    """Return the share of parameters that violate the bound after the first task, averaged over seeds."""
    known = _known_stability(row)
    return fmean(100 * _violation_count(s) / parameter_count(s) for s in known) if known else 0.0


@dataclass(frozen=True)
class ViolationSweep:
    """A method on a data set over a range of strengths.

    Attributes:
        condition: network, regime and data set.
        method: the method without clamping.
        rows: one for each strength, in ascending order.
        clamped: the same strengths with importance clamped to 1 / (lr * strength).
    """

    condition: Condition
    method: str
    rows: Sequence[Row]
    clamped: Sequence[Row]

    @property
    def first_violation(self) -> float:
        """The smallest strength at which a parameter of any seed violates the bound after the first task."""
        return min(stability.safe_strength for row in self.rows for stability in _known_stability(row))

    @property
    def first_unstable(self) -> Row | None:
        """The smallest strength at which a seed became unstable under the penalty; None if none did."""
        return next(filter(_broke, self.rows), None)

    @property
    def degraded(self) -> list[Row]:
        """The strengths at which a seed finished far below its clamped run: it diverged, but not to infinity."""
        degraded = []
        for row, clamped in zip(self.rows, self.clamped, strict=True):
            runs, references = (metric_values(r.results, "accuracy") for r in (row, clamped))  # NaN if unfinished
            if any(run < reference - ACCURACY_DROP for run, reference in zip(runs, references, strict=True)):
                degraded.append(row)
        return degraded


def run(context: PaperContext) -> TargetResult:
    """Measure violations at each strength, where training becomes unstable, and whether clamping prevents it."""
    sweeps, runs = measure(context)
    tables = [table for condition, group in sweeps.items() if group for table in _tables(condition, group)]
    return TargetResult("fig-violations", (), tables, runs, partial(_draw, sweeps))


def measure(context: PaperContext) -> tuple[dict[Condition, list[ViolationSweep]], list[Result]]:
    """Return the sweeps of each data set, and all runs: also those that showed where the range of a method is."""
    scale = context.scale
    columns = [(condition, method) for condition in scale.first_conditions() for method in REGULARIZERS]
    lrs = {column: paper_setting(scale, *column).lr for column in columns}
    seeds = min(scale.seeds, MAX_SEEDS)
    # Importance after the first task does not depend on the strength: any run shows where the first violation is.
    probes = context.run_groups(
        {c: context.seed_specs(*c, Setting(lrs[c], min(scale.strengths)), seeds) for c in columns}, decides=True
    )
    specs: dict[tuple[Condition, str], list[RunSpec]] = {}
    for (condition, method), runs in probes.items():
        first = min((s.safe_strength for run in runs for s in run.stability[:1]), default=math.inf)
        per_decade = min(scale.seeds, MAX_STRENGTHS_PER_DECADE)
        for strength in strength_grid(first, per_decade) if math.isfinite(first) else ():
            for name in (method, f"{CLAMPED}{method}"):
                setting = Setting(lrs[condition, method], strength)
                specs.setdefault((condition, name), []).extend(context.seed_specs(condition, name, setting, seeds))
    trained = context.run_groups(specs)
    rows = {key: summarize_seeds(results) for key, results in trained.items()}
    sweeps = {
        condition: [
            ViolationSweep(condition, method, rows[condition, method], rows[condition, f"{CLAMPED}{method}"])
            for method in REGULARIZERS
            if (condition, method) in rows
        ]
        for condition in scale.first_conditions()
    }
    return sweeps, unique_runs((*probes.values(), *trained.values()))


def _tables(condition: Condition, sweeps: Sequence[ViolationSweep]) -> list[ResultTable]:
    """Return two tables: where training first became unstable, next to the paper's; then every strength."""
    first = [_first_unstable_row(sweep) for sweep in sweeps]
    rows: list[dict[str, Any]] = []
    for sweep in sweeps:
        for row, clamped in zip(sweep.rows, sweep.clamped, strict=True):
            strength = float(row.setting.strength or 0)
            known = _known_stability(row)
            rows.append(
                {
                    "method": sweep.method,
                    "strength": f"{strength:g}",
                    "of first violation": f"{strength / sweep.first_violation:.3g}",
                    "violating": f"{fmean(map(_violation_count, known)):g}" if known else None,
                    "violating, %": f"{_violation_percentage(row):.3g}",
                    "beyond divergence": f"{fmean(s.diverge - s.negative for s in known):g}" if known else None,
                    "unstable": f"{unstable_count(row)} of {len(row.results)}",
                    "accuracy": str(row.metrics["accuracy"]) if row.metrics else None,
                    "clamped, unstable": f"{unstable_count(clamped)} of {len(clamped.results)}",
                    "clamped, accuracy": str(clamped.metrics["accuracy"]) if clamped.metrics else None,
                }
            )
    return [
        ResultTable(f"{condition}: where training first became unstable", list(first[0]), first),
        ResultTable(f"{condition}: violations after the first task, means over seeds", list(rows[0]), rows),
    ]


def _first_unstable_row(sweep: ViolationSweep) -> dict[str, Any]:
    unstable = sweep.first_unstable
    strength = None if unstable is None else unstable.setting.strength or 0
    broken = [] if unstable is None else [run for run in unstable.results if unstable_under_penalty(run)]
    clamped = [f"{row.setting.strength:g}" for row in sweep.clamped if _broke(row)]
    degraded = sweep.degraded
    return {
        "method": sweep.method,
        "lr": f"{sweep.rows[0].setting.lr:g}",
        "first violation at": f"{sweep.first_violation:.3g}",
        "unstable from": None if strength is None else f"{strength:g}",
        "times the first violation": None if strength is None else f"{strength / sweep.first_violation:.3g}",
        "violating then": min(map(violations_after_first_task, broken), default=None),  # in the run with the fewest
        "paper's violating then": published_violations(sweep.condition.data, sweep.method),
        "fallen from": f"{degraded[0].setting.strength:g}" if degraded else None,
        "parameters": max(parameter_count(s) for row in sweep.rows for s in _known_stability(row)),
        "clamped, unstable from": clamped[0] if clamped else None,
    }


def _draw(sweeps_by_condition: Mapping[Condition, Sequence[ViolationSweep]]) -> list[Drawing]:
    """Draw for each data set the share of violating parameters, one panel for each method, with rows of marks below."""
    drawings = []
    for condition, sweeps in sweeps_by_condition.items():
        if not sweeps:
            continue
        shares = [share for sweep in sweeps for row in sweep.rows if (share := _violation_percentage(row)) > 0]
        low, high = math.floor(math.log10(min(shares, default=0.1))), 2.0
        unit = (high - low) / 12
        marks = {low - 1.5 * unit: "unclamped", low - 2.7 * unit: "clamped"}
        figure = Figure(figsize=(WIDTH, 2.7))
        panels = figure.subplots(1, len(REGULARIZERS), squeeze=False)[0]
        figure.subplots_adjust(left=0.09, right=0.985, top=0.91, bottom=0.16, wspace=0.09)
        for panel in panels[len(sweeps) :]:
            panel.remove()
        for index, (panel, sweep) in enumerate(zip(panels, sweeps, strict=False)):
            x = [math.log10(row.setting.strength or 1.0) for row in sweep.rows]
            y = [math.log10(share) if (share := _violation_percentage(row)) > 0 else math.nan for row in sweep.rows]
            panel.set(xlim=(x[0] - 0.15, x[-1] + 0.15), ylim=(low - 3.5 * unit, high + unit / 2))
            panel.set_title(sweep.method, loc="left")
            panel.set_title(f"lr {sweep.rows[0].setting.lr:g}", loc="right", color=FAINT, size=6.5)
            panel.axhline(low - 0.6 * unit, color=RULE, lw=0.7)
            panel.axvline(math.log10(sweep.first_violation), color=FAINT, lw=1, ls=":")
            panel.plot(x, y, "o-", color=LINES[0], lw=1.3, ms=2.6, mew=0)
            for height, rows, colour in zip(marks, (sweep.rows, sweep.clamped), (LINES[0], LINES[2]), strict=True):
                draw_stability_marks(panel, x, height, [unstable_count(row) > 0 for row in rows], colour)
            rings = [math.log10(row.setting.strength or 1.0) for row in sweep.degraded if not unstable_count(row)]
            panel.plot(rings, [next(iter(marks))] * len(rings), "o", color=PAPER, ms=1.6, mew=0)
            x_ticks = ticks(x[0], x[-1], 5)
            panel.set_xticks(list(x_ticks), list(x_ticks.values()))
            panel.set_xlabel("strength")
            labels = {**marks, **ticks(low, high)} if index == 0 else {}
            panel.set_yticks(list(labels), list(labels.values()))
        panels[0].set_ylabel("violating parameters, %", labelpad=2)
        unstable = [sweep.method for sweep in sweeps if sweep.first_unstable is not None]
        drawings.append(
            Drawing(
                condition.data,
                f"Violations of lr * strength * importance < 1: {condition}",
                "The share of parameters that violate the bound after the first task, before clamping; mean over "
                "seeds, both scales logarithmic. The dotted line is the strength of the first violation. Below, "
                "without and with clamping: a dot where training was stable with every seed, a ring where it was "
                f"stable but a seed ended more than {ACCURACY_DROP:g} points below its clamped run, a cross where it "
                "was unstable.",
                f"Line charts for {len(sweeps)} methods: violating parameters against strength on {condition.data}; "
                f"without clamping training became unstable for {', '.join(unstable) or 'none'}.",
                figure,
            )
        )
    return drawings
