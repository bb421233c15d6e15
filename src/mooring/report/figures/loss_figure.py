"""Training loss, task after task."""

import numpy as np
from matplotlib.lines import Line2D

from mooring.report.figures.logarithm import logarithm, ticks
from mooring.report.figures.small_multiples import grid, head
from mooring.report.figures.tasks import every
from mooring.report.picture import Drawing
from mooring.report.section import Array, Entry, Section, mean_over_seeds
from mooring.report.style import FAINT, RULE

__all__ = ["draw"]


def draw(section: Section) -> Drawing | None:
    """A panel for each method, with plain fine-tuning behind it to compare with."""
    tasks = section.tasks
    curves = {entry: curve for entry in section.shown if (curve := _curve(entry, tasks)) is not None}
    if not curves:
        return None
    plain = next((curve for entry, curve in curves.items() if entry.row.setting.method == "plain"), None)
    lowest = min(float(np.nanmin(y)) for _, y in curves.values())
    highest = max(float(np.nanmax(y)) for _, y in curves.values())
    margin = 0.04 * (highest - lowest) + 0.02
    made = grid(len(curves), 0.72)
    for panel, (entry, (x, y)) in zip(made.panels, curves.items(), strict=True):
        head(panel, entry)
        panel.set(xlim=(0, tasks), ylim=(lowest - margin, highest + margin))
        panel.vlines(range(1, tasks), lowest - margin, highest + margin, color=RULE, lw=0.6, zorder=0)
        if plain is not None and plain[1] is not y:
            panel.plot(*plain, color=FAINT, lw=0.7, alpha=0.65)
        panel.plot(x, y, color=entry.family.colour, lw=1.3)
    middles = {number - 0.5: str(number) for number in every(tasks)}
    made.ticks(middles, ticks(lowest, highest), "task", "training loss")
    marks = [(Line2D([], [], color=family.colour, lw=1.6), family.name) for family in section.families]
    marks += [] if plain is None else [(Line2D([], [], color=FAINT, lw=0.9), "plain, to compare")]
    made.figure.legend(*zip(*marks, strict=True), loc="upper left", ncols=len(marks), bbox_to_anchor=(0.045, 1.0))
    return Drawing(
        "losses",
        "Training loss",
        "Mean training loss over equal stretches of each task; mean over seeds, logarithmic "
        f"scale{section.at_best}. Vertical lines part the tasks.",
        f"Line charts for {len(curves)} methods: training loss over {tasks} tasks.",
        made.figure,
    )


def _curve(entry: Entry, tasks: int) -> tuple[Array, Array] | None:
    """Where in the stream, in tasks, and log10 of the mean loss there; None where no loss was kept."""
    runs = [result.losses for result in entry.row.results if any(result.losses)]
    x, y = [], []
    for task in range(tasks):
        reached = [np.array(run[task], dtype=np.float64) for run in runs if len(run) > task and len(run[task])]
        if not reached:
            break
        stretches = max(map(len, reached))
        padded = np.full((len(reached), stretches), np.nan)
        for line, values in zip(padded, reached, strict=True):
            line[: len(values)] = values
        x.append(task + (np.arange(stretches) + 0.5) / stretches)
        y.append(logarithm(mean_over_seeds(padded)[0]))
        # A gap between tasks: the loss starts anew with each.
        x.append(np.array([task + 1.0]))
        y.append(np.array([np.nan]))
    if not x or not np.isfinite(found := np.concatenate(y)).any():
        return None
    return np.concatenate(x), found
