"""The accuracy matrix: accuracy on task k after task i."""

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes

from mooring_lab.report.panel_grid import PanelGrid, add_heading, small_multiples
from mooring_lab.report.picture import Drawing
from mooring_lab.report.section import Array, Section, mean_over_seeds
from mooring_lab.report.style import FAINT
from mooring_lab.report.tasks import axis_floor, labelled_tasks

ON_DARK, ON_BRIGHT = "#fdfdfd", "#111111"
"""Text on a coloured cell, whose colour is the same in light and dark mode."""

MAX_TASKS_WITH_NUMBERS = 6
"""With more tasks, a cell has no room for its number."""


def draw(section: Section) -> Drawing | None:
    """Draw a heat map for each method."""
    tasks = section.tasks
    shown = [entry for entry in section.shown if any(run.matrix for run in entry.row.results)]
    if not shown or tasks < 2:
        return None
    means = [mean_over_seeds(entry.matrices(tasks))[0] for entry in shown]
    # From trained tasks only: tasks to come are near chance and would take up most of the colours.
    low = axis_floor(np.concatenate([mean[np.tril_indices(tasks)] for mean in means]))
    panels = small_multiples(len(shown), 1.0)
    for panel, entry, mean in zip(panels.axes, shown, means, strict=True):
        add_heading(panel, entry)
        _cells(panel, mean, low)
    labels = {number - 1.0: str(number) for number in labelled_tasks(tasks)}
    panels.set_ticks(labels, labels, "accuracy on task", "after task")
    _scale(panels, low)
    return Drawing(
        "matrices",
        "Accuracy on each task after each task",
        "Accuracy in percent on each task (column) after each task was trained (row); mean over "
        f"seeds{section.at_best}. Below the stepped line a task has been trained; above it, it is still to "
        "come. A column, read downwards, shows how a task is forgotten. Blank cells were not scored: of the tasks to "
        "come only the next one is. No seed reached a blank row.",
        f"Heat maps for {len(shown)} methods: accuracy on each of {tasks} tasks after each task was trained.",
        panels.figure,
    )


def _cells(panel: Axes, mean: Array, low: float) -> None:
    tasks = len(mean)
    panel.imshow(mean, cmap="viridis", vmin=low, vmax=100, interpolation="none", aspect="auto")
    panel.spines[["left", "bottom"]].set_visible(False)
    reached = min(int(np.isfinite(mean).any(1).sum()), tasks - 1)
    edge = np.repeat(np.arange(reached + 2) - 0.5, 2)
    panel.plot(edge[2:-1], edge[1:-2], color=ON_DARK, lw=1.1, solid_joinstyle="miter")
    if tasks > MAX_TASKS_WITH_NUMBERS:
        return
    for (row, column), value in np.ndenumerate(mean):
        if np.isfinite(value):
            ink = ON_BRIGHT if (value - low) / (100 - low) > 0.6 else ON_DARK
            panel.text(column, row, f"{value:.0f}", color=ink, size=6.5, ha="center", va="center_baseline")


def _scale(panels: PanelGrid, low: float) -> None:
    """Draw the colour scale, from the floor to 100 %, above the panels."""
    width, height = panels.figure.get_size_inches()
    box = ((width - 2.05) / width, 1 - 0.17 / height, 1.5 / width, 0.08 / height)
    bar = panels.figure.add_axes(box, yticks=[])
    bar.imshow(colormaps["viridis"](np.linspace(0, 1, 64))[None], aspect="auto", interpolation="none")
    bar.set_axis_off()
    bar.text(-2, 0, f"{low:g} % or less", ha="right", va="center_baseline", color=FAINT)
    bar.text(65.5, 0, "100 %", va="center_baseline", color=FAINT)
