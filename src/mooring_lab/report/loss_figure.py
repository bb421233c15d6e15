"""Training loss over the tasks."""

import numpy as np
from matplotlib.lines import Line2D

from mooring_lab.report.logarithm import logarithm, ticks
from mooring_lab.report.panel_grid import add_heading, small_multiples
from mooring_lab.report.picture import Drawing
from mooring_lab.report.section import Array, Entry, Section, mean_over_seeds
from mooring_lab.report.style import FAINT, RULE, add_legend
from mooring_lab.report.tasks import labelled_tasks


def draw(section: Section) -> Drawing | None:
    """Draw a panel for each method, with plain fine-tuning behind it for comparison."""
    tasks = section.tasks
    histories = {entry: history for entry in section.shown if (history := _loss_history(entry, tasks)) is not None}
    if not histories:
        return None
    plain = next((history for entry, history in histories.items() if entry.row.setting.method == "plain"), None)
    lowest = min(float(np.nanmin(y)) for _, y in histories.values())
    highest = max(float(np.nanmax(y)) for _, y in histories.values())
    margin = 0.04 * (highest - lowest) + 0.02
    present = {entry.family for entry in histories}
    marks = [(Line2D([], [], color=f.colour, lw=1.6), f.name) for f in section.families if f in present]
    marks += [] if plain is None else [(Line2D([], [], color=FAINT, lw=0.9), "plain, behind")]
    panels = small_multiples(len(histories), 0.72, len(marks))
    for panel, (entry, (x, y)) in zip(panels.axes, histories.items(), strict=True):
        add_heading(panel, entry)
        panel.set(xlim=(0, tasks), ylim=(lowest - margin, highest + margin))
        panel.vlines(range(1, tasks), lowest - margin, highest + margin, color=RULE, lw=0.6, zorder=0)
        if plain is not None and plain[1] is not y:
            panel.plot(*plain, color=FAINT, lw=0.7, alpha=0.65)
        panel.plot(x, y, color=entry.family.colour, lw=1.3)
    middles = {number - 0.5: str(number) for number in labelled_tasks(tasks)}
    panels.set_ticks(middles, ticks(lowest, highest), "task", "training loss")
    add_legend(panels.figure, marks)
    return Drawing(
        "losses",
        "Training loss",
        "Mean training loss over equal parts of each task; mean over seeds, logarithmic "
        f"scale{section.at_best}. Vertical lines separate the tasks."
        + ("" if plain is None else " The grey line is plain fine-tuning, for comparison."),
        f"Line charts for {len(histories)} methods: training loss over {tasks} tasks.",
        panels.figure,
    )


def _loss_history(entry: Entry, tasks: int) -> tuple[Array, Array] | None:
    """Return positions in the stream, in tasks, and log10 of the mean loss; None if no loss was recorded."""
    runs = [result.losses for result in entry.row.results if any(result.losses)]
    x, y = [], []
    for task in range(tasks):
        reached = [np.array(run[task], dtype=np.float64) for run in runs if len(run) > task and len(run[task])]
        if not reached:
            break
        parts = max(map(len, reached))
        padded = np.full((len(reached), parts), np.nan)
        for line, values in zip(padded, reached, strict=True):
            line[: len(values)] = values
        x.append(task + (np.arange(parts) + 0.5) / parts)
        y.append(logarithm(mean_over_seeds(padded)[0]))
        # NaN leaves a gap: the loss jumps between tasks.
        x.append(np.array([task + 1.0]))
        y.append(np.array([np.nan]))
    if not x or not np.isfinite(losses := np.concatenate(y)).any():
        return None
    return np.concatenate(x), losses
