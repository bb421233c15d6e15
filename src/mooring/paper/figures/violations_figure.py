"""The figure of Case 2."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mooring.paper.context.scale import REGULARIZERS, Case
from mooring.paper.context.seed_rows import unstable_in
from mooring.paper.figures.negative_importance import mark
from mooring.paper.figures.violation_metrics import FALLEN, Found, share_violating

if TYPE_CHECKING:
    from mooring.report.picture import Drawing

__all__ = ["draw"]


def draw(by_case: Mapping[Case, Sequence[Found]]) -> "list[Drawing]":
    """For each data set: the share of violating parameters, a panel for each method, and rows of marks below."""
    from matplotlib.figure import Figure  # slow to import

    from mooring.report.figures.logarithm import ticks
    from mooring.report.picture import Drawing
    from mooring.report.style import FAINT, LINES, PAPER, RULE, WIDTH

    drawn = []
    for case, found in by_case.items():
        if not found:
            continue
        shares = [share for each in found for row in each.rows if (share := share_violating(row)) > 0]
        low, high = math.floor(math.log10(min(shares, default=0.1))), 2.0
        unit = (high - low) / 12
        marks = {low - 1.5 * unit: "unclamped", low - 2.7 * unit: "clamped"}
        figure = Figure(figsize=(WIDTH, 2.7))
        panels = figure.subplots(1, len(REGULARIZERS), squeeze=False)[0]
        figure.subplots_adjust(left=0.09, right=0.985, top=0.91, bottom=0.16, wspace=0.09)
        for panel in panels[len(found) :]:
            panel.remove()
        for number, (panel, each) in enumerate(zip(panels, found, strict=False)):
            x = [math.log10(row.setting.strength or 1.0) for row in each.rows]
            y = [math.log10(share) if (share := share_violating(row)) > 0 else math.nan for row in each.rows]
            panel.set(xlim=(x[0] - 0.15, x[-1] + 0.15), ylim=(low - 3.5 * unit, high + unit / 2))
            panel.set_title(each.method, loc="left")
            panel.set_title(f"lr {each.rows[0].setting.lr:g}", loc="right", color=FAINT, size=6.5)
            panel.axhline(low - 0.6 * unit, color=RULE, lw=0.7)
            panel.axvline(math.log10(each.first_violation), color=FAINT, lw=1, ls=":")
            panel.plot(x, y, "o-", color=LINES[0], lw=1.3, ms=2.6, mew=0)
            for at, rows, colour in zip(marks, (each.rows, each.clamped), (LINES[0], LINES[2]), strict=True):
                mark(panel, x, at, [unstable_in(row) > 0 for row in rows], colour)
            fallen = [math.log10(row.setting.strength or 1.0) for row in each.fallen if not unstable_in(row)]
            panel.plot(fallen, [next(iter(marks))] * len(fallen), "o", color=PAPER, ms=1.6, mew=0)
            shown = ticks(x[0], x[-1], 5)
            panel.set_xticks(list(shown), list(shown.values()))
            panel.set_xlabel("strength")
            labels = {**marks, **ticks(low, high)} if number == 0 else {}
            panel.set_yticks(list(labels), list(labels.values()))
        panels[0].set_ylabel("violating parameters, %", labelpad=2)
        lost = [each.method for each in found if each.broken is not None]
        drawn.append(
            Drawing(
                case.data,
                f"Violations of lr * strength * importance < 1: {case}",
                "The share of parameters that violate the bound after the first task, before any clamping; mean over "
                "seeds, both scales logarithmic. The dotted line is the strength at which the first parameter does. "
                "Below: a dot where training was stable in every seed, a ring where it was but a seed ended more than "
                f"{FALLEN:g} points below its clamped self, a cross where it was not; without clamping and with it.",
                f"Line charts for {len(found)} methods: violating parameters against strength on {case.data}; without "
                f"clamping training became unstable for {', '.join(lost) or 'none'}.",
                figure,
            )
        )
    return drawn
