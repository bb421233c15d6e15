"""Case 1 of instability, negative importance: SI with positive scores, with a few negative ones, and signed."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from mooring_lab.model.summary import Row
from mooring_paper.context.paper_context import PaperContext, paper_setting
from mooring_paper.context.scale import Condition
from mooring_paper.context.seed_statistics import summarize_seeds, unstable_count
from mooring_paper.context.target_result import ResultTable, TargetResult
from mooring_paper.figures.panels import draw_stability_marks
from mooring_paper.figures.violations import parameter_count
from mooring_paper.published.published_numbers import Setting

if TYPE_CHECKING:
    from mooring_lab.report.picture import Drawing

POSITIVE = "si-absolute"
VARIANTS = {
    POSITIVE: "all positive",
    "si-negative": "0.1 % keep their sign",
    "si-flipped": "0.1 % negative",
    "si-signed": "signed",
}
"""The paper's "All Pos.", two readings of its "0.1 % Neg.", and "Original".

Under SGD from rest the path integral of a parameter is never negative: with momentum m it is lr times the sum over
steps s <= t of m^(t - s) * g_s * g_t, a positive definite form. Few scores are therefore negative, unless a variant
flips them.
"""


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
    strengths, seeds = sorted(context.scale.strengths), range(context.scale.seeds)
    specs = {}
    for condition in context.scale.first_conditions():
        lr = paper_setting(context.scale, condition, "si").lr
        settings = [("plain", Setting(lr, None))]
        settings += [(name, Setting(lr, strength)) for name in VARIANTS for strength in strengths]
        specs[condition] = [
            context.spec(condition, name, seed, setting) for name, setting in settings for seed in seeds
        ]
    known = context.run([spec for group in specs.values() for spec in group])
    sweeps = []
    for condition, group in specs.items():
        rows = summarize_seeds(known[spec] for spec in group)
        by_variant = {name: [row for row in rows if row.setting.method == name] for name in VARIANTS}
        sweeps.append(SignSweep(condition, rows[0], by_variant))
    text = [sentence for sweep in sweeps for sentence in _text(sweep)]
    tables = [_table(sweep) for sweep in sweeps]
    return TargetResult("fig-negative", text, tables, list(known.values()), partial(_draw, sweeps))


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


def _text(sweep: SignSweep) -> list[str]:
    data, positive = sweep.condition.data, sweep.rows[POSITIVE]
    text = [_positive_sentence(data, positive)]
    for name, variant in sweep.rows.items():
        if name == POSITIVE:
            continue
        pairs = list(zip(variant, positive, strict=True))
        comparable = [row for row, other in pairs if not unstable_count(other)]
        unstable = [f"{row.setting.strength:g}" for row in comparable if unstable_count(row)]
        which = f" (strength {', '.join(unstable)})" if unstable else ""
        counts = [_negative_counts(row) for row in variant]
        first = max((tasks[0] for tasks in counts if tasks), default=0)
        later = max((max(tasks[1:]) for tasks in counts if len(tasks) > 1), default=0)
        known = [stability for row in variant for result in row.results for stability in result.stability[:1]]
        parameters = max(map(parameter_count, known), default=0)
        text.append(
            f"{data}, {name}: unstable at {len(unstable)} of the {len(comparable)} strengths at which {POSITIVE} is "
            f"stable{which}; at most {first:,} of {parameters:,} scores were negative after the first task, and "
            f"{later:,} after a later one."
        )
        without = [(row, other) for row, other in pairs if not any(_negative_counts(row))]
        if without:
            different = [pair for pair in without if not _same_runs(*pair)]
            early = sum([r.matrix[:1] for r in a.results] != [r.matrix[:1] for r in b.results] for a, b in different)
            rounding = (
                f"; at the other {len(different)} the two differ although their scores do not, at {early} of them "
                "already in the first task, before a penalty acts: the last bits of a run depend on the fleet that "
                "trains it"
            )
            text.append(
                f"{data}, {name}: at {len(without)} of {len(pairs)} strengths no score was negative after any task; at "
                f"{len(without) - len(different)} of these every accuracy equals that of {POSITIVE}"
                f"{rounding if different else ''}."
            )
    plain = sweep.plain.metrics.get("accuracy")
    weakest = {name: variant[0].metrics.get("accuracy") for name, variant in sweep.rows.items()}
    accuracies = [f"{name} {accuracy}" for name, accuracy in weakest.items() if accuracy is not None]
    if plain is not None and accuracies:
        text.append(
            f"{data}: accuracy at the smallest strength, {positive[0].setting.strength:g}: {', '.join(accuracies)}; "
            f"plain fine-tuning {plain}."
        )
    return text


def _positive_sentence(data: str, rows: Sequence[Row]) -> str:
    """Return whether positive scores are always stable, and whether those that are not are Case 2."""
    unstable_rows = [row for row in rows if unstable_count(row)]
    if not unstable_rows:
        return f"{data}, {POSITIVE}: stable at all {len(rows)} strengths, as in the paper."
    runs = [result for row in unstable_rows for result in row.results if result.status == "unstable"]
    beyond = sum(any(stability.largest >= 1 for stability in result.stability) for result in runs)
    which = ", ".join(f"{row.setting.strength:g}" for row in unstable_rows)
    return (
        f"{data}, {POSITIVE}: unstable at {len(unstable_rows)} of {len(rows)} strengths ({which}), without any "
        f"negative score; in {beyond} of these {len(runs)} runs lr * strength * importance had reached 1, which is "
        "Case 2."
    )


def _draw(sweeps: Sequence[SignSweep]) -> "list[Drawing]":
    """Draw for each data set accuracy against strength, a line for each variant, with rows of marks below."""
    from matplotlib.figure import Figure  # slow to import

    from mooring_lab.report.figures.logarithm import ticks
    from mooring_lab.report.picture import Drawing
    from mooring_lab.report.style import FAINT, LINES, RULE, WIDTH

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
