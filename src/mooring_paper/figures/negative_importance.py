"""Case 1 of instability, negative importance: SI with positive scores, with a few negative ones, and signed."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from matplotlib.figure import Figure

from mooring_lab.model.summary import Row
from mooring_lab.report.logarithm import ticks
from mooring_lab.report.picture import Drawing
from mooring_lab.report.style import FAINT, LINES, RULE, WIDTH
from mooring_paper.context.paper_context import PaperContext, paper_setting, unique_runs
from mooring_paper.context.scale import Condition
from mooring_paper.context.seed_statistics import summarize_seeds, unstable_count
from mooring_paper.context.target_result import ResultTable, TargetResult
from mooring_paper.figures.panels import draw_stability_marks
from mooring_paper.figures.violations import parameter_count
from mooring_paper.published.published_numbers import Setting

POSITIVE = "si-absolute"
VARIANTS = {
    POSITIVE: "all positive",
    "si-negative": "0.1 % keep their sign",
    "si-flipped": "0.1 % negative",
    "si-signed": "signed",
}
"""The paper's "All Pos.", two readings of its "0.1 % Neg.", and "Original", which has few negative scores."""


@dataclass(frozen=True)
class SignSweep:
    """The variants of SI on a data set, over strengths.

    Attributes:
        condition: network, regime and data set.
        plain: fine-tuning without a penalty, for comparison.
        rows: one for each strength, by variant.
    """

    condition: Condition
    plain: Row
    rows: Mapping[str, Sequence[Row]]


def run(context: PaperContext) -> TargetResult:
    """Measure at which strengths each variant is stable, its accuracy, and how many scores are negative."""
    sweeps = measure(context)
    runs = unique_runs(
        row.results for sweep in sweeps for rows in ([sweep.plain], *sweep.rows.values()) for row in rows
    )
    text = [_signed_text(sweeps)]
    return TargetResult("fig-negative", text, [_table(sweep) for sweep in sweeps], runs, partial(_draw, sweeps))


def measure(context: PaperContext) -> list[SignSweep]:
    """Return the runs of every variant at every strength, on every data set."""
    specs = {}
    for condition in context.scale.first_conditions():
        lr = paper_setting(context.scale, condition, "si").lr
        settings = [("plain", Setting(lr, None))]
        settings += [(name, Setting(lr, strength)) for name in VARIANTS for strength in sorted(context.scale.strengths)]
        specs[condition] = [s for name, setting in settings for s in context.seed_specs(condition, name, setting)]
    sweeps = []
    for condition, results in context.run_groups(specs).items():
        rows = summarize_seeds(results)
        by_variant = {name: [row for row in rows if row.setting.method == name] for name in VARIANTS}
        sweeps.append(SignSweep(condition, rows[0], by_variant))
    return sweeps


def _negative_counts(row: Row) -> list[int]:
    """Return the number of negative scores after each task, the maximum over the seeds that finished it."""
    counts = [[stability.negative for stability in result.stability] for result in row.results]
    return [max(c[task] for c in counts if len(c) > task) for task in range(max(map(len, counts)))]


def _same_runs(row: Row, other: Row) -> bool:
    """Return whether all seeds have the same status and the same accuracies on every task that both evaluated."""
    return all(
        (one.status, len(one.matrix)) == (two.status, len(two.matrix))
        and all(a[: len(b)] == b[: len(a)] for a, b in zip(one.matrix, two.matrix, strict=True))
        for one, two in zip(row.results, other.results, strict=True)
    )


def _table(sweep: SignSweep) -> ResultTable:
    rows: list[dict[str, Any]] = []
    for name, variant in sweep.rows.items():
        for row, positive in zip(variant, sweep.rows[POSITIVE], strict=True):
            negatives, accuracy, bounds = _negative_counts(row), row.metrics.get("accuracy"), None
            if accuracy is not None and not math.isnan(accuracy.low):
                bounds = f"{accuracy.low:.2f} to {accuracy.high:.2f}"
            rows.append(
                {
                    "method": name,
                    "scores": VARIANTS[name],
                    "strength": f"{row.setting.strength:g}",
                    "unstable": f"{unstable_count(row)} of {len(row.results)}",
                    "accuracy": None if accuracy is None else str(accuracy),
                    "95 % interval": bounds,
                    "most below 0": max(negatives, default=0),
                    "below 0 after each task": ", ".join(map(str, negatives)),
                    f"accuracies as {POSITIVE}": None if name == POSITIVE else _same_runs(row, positive),
                }
            )
    return ResultTable(f"{sweep.condition}, lr {sweep.plain.setting.lr:g}", list(rows[0]), rows)


def _signed_text(sweeps: Sequence[SignSweep]) -> str:
    """Say how many scores of signed SI are negative, and why there are so few."""
    runs = [run for sweep in sweeps for row in sweep.rows["si-signed"] for run in row.results]
    first, later = (
        max((s.negative for run in runs for s in run.stability[part]), default=0) for part in (slice(1), slice(1, None))
    )
    parameters = max((parameter_count(s) for run in runs for s in run.stability), default=0)
    return (
        f"Of the {parameters:,} scores of signed SI, at most {first:,} are negative after the first task of a run, "
        f"and at most {later:,} after later ones. Along a descent from rest none can be: with momentum m, the path "
        "integral of a weight is lr times the sum over steps s <= t of m^(t - s) g_s g_t, a positive definite form."
    )


def _draw(sweeps: Sequence[SignSweep]) -> list[Drawing]:
    """Draw for each data set accuracy against strength, a line for each variant, with rows of marks below."""
    drawings = []
    for sweep in sweeps:
        figure = Figure(figsize=(WIDTH, 3.7))
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(5, 1.3))
        figure.subplots_adjust(left=0.145, right=0.985, top=0.87, bottom=0.12, hspace=0.06)
        x = [math.log10(row.setting.strength or 1.0) for row in sweep.rows[POSITIVE]]
        plain = sweep.plain.metrics.get("accuracy")
        if plain is not None:
            top.axhline(plain.mean, color=FAINT, lw=0.9, ls=":", label="plain fine-tuning")
        for index, (name, rows) in enumerate(sweep.rows.items()):
            accuracies = [row.metrics.get("accuracy") for row in rows]
            y = [math.nan if value is None else value.mean for value in accuracies]
            spread = [0.0 if value is None or math.isnan(value.std) else value.std for value in accuracies]
            colour, dash, width = LINES[index], ("-", "--", "-.", ":")[index], (3.2, 1.9, 1.6, 1.3)[index]
            # Widths, dashes and offsets keep lines and error bars that coincide visible.
            top.plot(x, y, dash, color=colour, lw=width, alpha=0.45 if index == 0 else 1.0)
            shifted = [value + 0.012 * (index - 1.5) * (x[-1] - x[0]) for value in x]
            label = f"{name}: {VARIANTS[name]}"
            top.errorbar(shifted, y, spread, fmt="o", color=colour, ms=3.6, mew=0, elinewidth=0.9, label=label)
            draw_stability_marks(bottom, x, -index, [unstable_count(row) > 0 for row in rows], colour)
        top.grid(axis="y")
        top.tick_params(bottom=False)
        top.set_ylabel("average accuracy, %")
        x_ticks = ticks(x[0], x[-1], 12)
        bottom.set_xticks(list(x_ticks), list(x_ticks.values()))
        bottom.set_yticks([-index for index in range(len(VARIANTS))], list(VARIANTS.values()))
        bottom.set_ylim(-len(VARIANTS) + 0.4, 0.6)
        bottom.set_xlabel("strength")
        bottom.vlines(x, -len(VARIANTS) + 0.4, 0.6, color=RULE, lw=0.6, zorder=0)
        figure.legend(loc="upper left", ncols=3, bbox_to_anchor=(0.137, 1.0))
        unstable = {name: sum(unstable_count(row) > 0 for row in rows) for name, rows in sweep.rows.items()}
        drawings.append(
            Drawing(
                sweep.condition.data,
                f"Negative scores: {sweep.condition}",
                "SI's penalty with all scores positive, with one score in a thousand that keeps its sign, with one in "
                "a thousand that is negative, and with signed scores. Above: average accuracy over the seeds that "
                "finished, with bars of one standard deviation. Below: a dot where training was stable with every "
                f"seed, a cross where it was not. Learning rate {sweep.plain.setting.lr:g}.",
                f"Line chart of average accuracy against strength for four variants of SI on {sweep.condition.data}; "
                + "; ".join(f"{name} unstable at {number}" for name, number in unstable.items())
                + f" of {len(x)} strengths.",
                figure,
            )
        )
    return drawings
