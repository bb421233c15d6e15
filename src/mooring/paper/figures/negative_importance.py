"""Case 1: importance below 0. SI with all scores positive, with a few that keep their sign or lose it, and signed."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from mooring.lab.model.summary import Row
from mooring.paper.context.context import Laboratory
from mooring.paper.context.result import Finding, Table
from mooring.paper.context.scale import Case, Scale
from mooring.paper.context.seed_rows import bounds, first_cases, over_seeds, papers_rate, unstable_in
from mooring.paper.published.published_numbers import Setting

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from mooring.report.picture import Drawing

__all__ = ["count", "mark", "run"]

POSITIVE = "si-absolute"
VARIANTS = {
    POSITIVE: "all positive",
    "si-negative": "0.1 % keep their sign",
    "si-flipped": "0.1 % negative",
    "si-signed": "signed",
}
"""The paper's "All Pos.", its "0.1 % Neg." read in two ways, and "Original".

Under SGD from rest the path integral of a parameter is never below 0: with momentum m it is lr times the sum over steps
s <= t of m^(t - s) * g_s * g_t, a positive definite form. So few scores are negative unless they are made so.
"""


@dataclass(frozen=True)
class Found:
    """What came of one data set.

    Attributes:
        case: network, regime and data set.
        plain: fine-tuning without a penalty, to compare with.
        rows: one for each strength, by variant.
    """

    case: Case
    plain: Row
    rows: Mapping[str, Sequence[Row]]


def count(scale: Scale) -> int:
    """How many models it trains: every variant at every strength, and plain fine-tuning.

    Example:
        >>> from mooring.paper.context.scale import MINIATURE, PAPER
        >>> count(MINIATURE), count(PAPER)
        (26, 615)
    """
    return (len(VARIANTS) * len(scale.strengths) + 1) * scale.seeds * len(scale.streams)


def run(lab: Laboratory) -> Finding:
    """Which strengths are stable in each variant, how accurate they are, and how many scores were below 0."""
    strengths = sorted(lab.scale.strengths)
    wanted = {}
    for case in first_cases(lab.scale):
        lr = papers_rate(lab.scale, case, "si")
        settings = [("plain", Setting(lr, None))]
        settings += [(name, Setting(lr, strength)) for name in VARIANTS for strength in strengths]
        seeds = range(lab.scale.seeds)
        wanted[case] = [lab.spec(case, name, seed, setting) for name, setting in settings for seed in seeds]
    known = lab.run([spec for specs in wanted.values() for spec in specs])
    found = []
    for case, specs in wanted.items():
        rows = over_seeds(known[spec] for spec in specs)
        by_variant = {name: [row for row in rows if row.setting.method == name] for name in VARIANTS}
        found.append(Found(case, rows[0], by_variant))
    text = [sentence for each in found for sentence in _said(each)]
    return Finding("fig-negative", text, [_table(each) for each in found], list(known.values()), partial(_draw, found))


def _negatives(row: Row) -> list[int]:
    """Scores below 0 after each task, the most of any seed that got there."""
    reached = max(len(result.stability) for result in row.results)
    told = [[each.negative for each in result.stability] for result in row.results]
    return [max(counts[task] for counts in told if len(counts) > task) for task in range(reached)]


def _same(row: Row, other: Row) -> bool:
    """Whether every seed ended alike, with the same accuracies after every task, on every task that both scored."""
    return all(
        (one.status, len(one.matrix)) == (two.status, len(two.matrix))
        and all(a[: len(b)] == b[: len(a)] for a, b in zip(one.matrix, two.matrix, strict=True))
        for one, two in zip(row.results, other.results, strict=True)
    )


def _first(row: Row) -> list[list[float]]:
    """What each seed scored after the first task."""
    return [scores for result in row.results for scores in result.matrix[:1]]


def _table(found: Found) -> Table:
    rows: list[dict[str, Any]] = []
    for name, line in found.rows.items():
        for row, positive in zip(line, found.rows[POSITIVE], strict=True):
            negatives, accuracy = _negatives(row), row.metrics.get("accuracy")
            rows.append(
                {
                    "method": name,
                    "scores": VARIANTS[name],
                    "strength": f"{row.setting.strength:g}",
                    "unstable": f"{unstable_in(row)} of {len(row.results)}",
                    "accuracy": None if accuracy is None else str(accuracy),
                    "95 % interval": bounds(accuracy),
                    "most below 0": max(negatives, default=0),
                    "below 0 after each task": ", ".join(map(str, negatives)),
                    f"accuracies as {POSITIVE}": None if name == POSITIVE else _same(row, positive),
                }
            )
    return Table(f"{found.case}, lr {found.plain.setting.lr:g}", list(rows[0]), rows)


def _said(found: Found) -> list[str]:
    """What the table shows, variant by variant."""
    data, positive = found.case.data, found.rows[POSITIVE]
    text = [_positive(data, positive)]
    for name, line in found.rows.items():
        if name == POSITIVE:
            continue
        pairs = list(zip(line, positive, strict=True))
        fine = [row for row, other in pairs if not unstable_in(other)]
        lost = [f"{row.setting.strength:g}" for row in fine if unstable_in(row)]
        which = f" (strength {', '.join(lost)})" if lost else ""
        text.append(
            f"{data}, {name}: unstable at {len(lost)} of the {len(fine)} strengths at which {POSITIVE} is "
            f"stable{which}; {_where(line)}."
        )
        without = [(row, other) for row, other in pairs if not any(_negatives(row))]
        if without:
            apart = [pair for pair in without if not _same(*pair)]
            early = sum(_first(row) != _first(other) for row, other in apart)
            rounding = (
                f"; at the other {len(apart)} the two differ without a score that does, at {early} of them in the "
                "first task already, before a penalty acts: the last bits of a run hang on the fleet that it sails in"
            )
            text.append(
                f"{data}, {name}: at {len(without)} of {len(pairs)} strengths no score was below 0 after any task; at "
                f"{len(without) - len(apart)} of these every accuracy is that of {POSITIVE}{rounding if apart else ''}."
            )
    plain = found.plain.metrics.get("accuracy")
    weakest = {name: line[0].metrics.get("accuracy") for name, line in found.rows.items()}
    told = [f"{name} {accuracy}" for name, accuracy in weakest.items() if accuracy is not None]
    if plain is not None and told:
        strength = positive[0].setting.strength
        text.append(
            f"{data}: at the smallest strength, {strength:g}, accuracy is {', '.join(told)}; plain fine-tuning {plain}."
        )
    return text


def _positive(data: str, line: Sequence[Row]) -> str:
    """Whether positive scores are always stable, and whether those that are not are Case 2."""
    lost = [row for row in line if unstable_in(row)]
    if not lost:
        return f"{data}, {POSITIVE}: stable at all {len(line)} strengths, as the paper says."
    unstable = [result for row in lost for result in row.results if result.status == "unstable"]
    beyond = sum(any(each.largest >= 1 for each in result.stability) for result in unstable)
    which = ", ".join(f"{row.setting.strength:g}" for row in lost)
    return (
        f"{data}, {POSITIVE}: unstable at {len(lost)} of {len(line)} strengths ({which}), without any score below 0; "
        f"in {beyond} of these {len(unstable)} runs lr * strength * importance had reached 1, which is Case 2."
    )


def _where(line: Sequence[Row]) -> str:
    """How many scores were below 0, after the first task and later."""
    every = [_negatives(row) for row in line]
    parameters = max((_parameters(row) for row in line), default=0)
    first = max((counts[0] for counts in every if counts), default=0)
    later = max((max(counts[1:]) for counts in every if len(counts) > 1), default=0)
    return (
        f"at most {first:,} of {parameters:,} scores were below 0 after the first task, and {later:,} after a later one"
    )


def _parameters(row: Row) -> int:
    told = [each for result in row.results for each in result.stability[:1]]
    return max((each.free + each.interpolate + each.extrapolate + each.diverge for each in told), default=0)


def mark(panel: "Axes", x: Sequence[float], y: float, unstable: Sequence[bool], colour: str) -> None:
    """A row of marks: a dot where training was stable in every seed, a cross where it was not."""
    from mooring.report.style import INK

    dots = [each for each, lost in zip(x, unstable, strict=True) if not lost]
    crosses = [each for each, lost in zip(x, unstable, strict=True) if lost]
    panel.plot(dots, [y] * len(dots), "o", color=colour, ms=3.2, mew=0, clip_on=False)
    panel.plot(crosses, [y] * len(crosses), "x", color=INK, ms=4.6, mew=1.2, clip_on=False)


def _draw(found: Sequence[Found]) -> "list[Drawing]":
    """For each data set: accuracy against strength, a line for each variant, and a row of marks below."""
    from matplotlib.figure import Figure  # slow to import

    from mooring.report.figures.logarithm import ticks
    from mooring.report.picture import Drawing
    from mooring.report.style import FAINT, LINES, RULE, WIDTH

    drawn = []
    for each in found:
        figure = Figure(figsize=(WIDTH, 3.7))
        top, below = figure.subplots(2, 1, sharex=True, height_ratios=(5, 1.3))
        figure.subplots_adjust(left=0.145, right=0.985, top=0.87, bottom=0.12, hspace=0.06)
        x = [math.log10(row.setting.strength or 1.0) for row in each.rows[POSITIVE]]
        plain = each.plain.metrics.get("accuracy")
        if plain is not None:
            top.axhline(plain.mean, color=FAINT, lw=0.9, ls=":", label="plain fine-tuning")
        for number, (name, line) in enumerate(each.rows.items()):
            told = [row.metrics.get("accuracy") for row in line]
            y = [math.nan if value is None else value.mean for value in told]
            spread = [0.0 if value is None or math.isnan(value.std) else value.std for value in told]
            colour, dash, wide = LINES[number], ("-", "--", "-.", ":")[number], (3.2, 1.9, 1.6, 1.3)[number]
            # Lines that coincide are seen through each other, and bars stand side by side.
            top.plot(x, y, dash, color=colour, lw=wide, alpha=0.45 if number == 0 else 1.0)
            aside = [value + 0.012 * (number - 1.5) * (x[-1] - x[0]) for value in x]
            label = f"{name}: {VARIANTS[name]}"
            top.errorbar(aside, y, spread, fmt="o", color=colour, ms=3.6, mew=0, elinewidth=0.9, label=label)
            mark(below, x, -number, [unstable_in(row) > 0 for row in line], colour)
        top.grid(axis="y")
        top.tick_params(bottom=False)
        top.set_ylabel("average accuracy, %")
        shown = ticks(x[0], x[-1], 12)
        below.set_xticks(list(shown), list(shown.values()))
        below.set_yticks([-number for number in range(len(VARIANTS))], list(VARIANTS.values()))
        below.set_ylim(-len(VARIANTS) + 0.4, 0.6)
        below.set_xlabel("strength")
        below.vlines(x, -len(VARIANTS) + 0.4, 0.6, color=RULE, lw=0.6, zorder=0)
        figure.legend(loc="upper left", ncols=3, bbox_to_anchor=(0.137, 1.0))
        drawn.append(
            Drawing(
                each.case.data,
                f"Scores below 0: {each.case}",
                "SI's penalty with all scores positive, with one in a thousand that keeps its sign, with one in a "
                "thousand that is negative, and signed. Above: "
                "average accuracy over the seeds that finished, bars of one standard deviation. Below: a dot where "
                "training was stable in every seed, a cross where it was not. "
                f"Learning rate {each.plain.setting.lr:g}.",
                f"Line chart of average accuracy against strength for four variants of SI on {each.case.data}; "
                + "; ".join(f"{name} unstable at {sum(map(_lost, line))}" for name, line in each.rows.items())
                + f" of {len(x)} strengths.",
                figure,
            )
        )
    return drawn


def _lost(row: Row) -> bool:
    return unstable_in(row) > 0
