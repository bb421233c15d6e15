"""Accuracy on each task during training."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.lines import Line2D

from mooring_lab.report.panel_grid import add_heading, small_multiples
from mooring_lab.report.picture import Drawing
from mooring_lab.report.section import Array, Section, mean_over_seeds
from mooring_lab.report.style import INK, RULE, add_legend, task_colours


def draw(section: Section) -> Drawing | None:
    """Draw a panel for each method: a line for each task since it was trained, and one for the mean so far."""
    tasks = section.tasks
    shown = [entry for entry in section.shown if any(run.matrix for run in entry.row.results)]
    if not shown:
        return None
    colours = task_colours(tasks)
    stacks = [entry.matrices(tasks) for entry in shown]
    trained = np.tril(np.ones((tasks, tasks), dtype=bool))
    low = axis_floor(np.concatenate([stack[:, trained].ravel() for stack in stacks]))
    named = range(tasks) if tasks <= 10 else (0, tasks - 1)
    marks = [(Line2D([], [], color=colours[task], lw=1.4), f"task {task + 1}") for task in named]
    marks.append((Line2D([], [], color=INK, lw=1.8), "mean so far"))
    panels = small_multiples(len(shown), 0.72, len(marks))
    for panel, entry, stack in zip(panels.axes, shown, stacks, strict=True):
        add_heading(panel, entry)
        panel.set(xlim=(0.7, tasks + 0.3), ylim=(low, 101))
        panel.hlines([(low + 100) / 2, 100], 0.7, tasks + 0.3, color=RULE, lw=0.6, zorder=0)
        _lines(panel, np.where(trained, stack, np.nan), colours)
    middle = (low + 100) / 2
    numbers = {float(number): str(number) for number in labelled_tasks(tasks)}
    levels = {low: f"{low:g}", middle: f"{middle:g}", 100: "100"}
    panels.set_ticks(numbers, levels, "tasks trained", "accuracy, %")
    add_legend(panels.figure, marks)
    return Drawing(
        "tasks",
        "Accuracy on each task during training",
        f"One panel for each method; mean over seeds{section.at_best}. A thin line follows one task from the time when "
        "it was trained (dot); its band is one standard deviation over seeds. The thick line is the mean over the "
        "tasks trained so far; it ends in a cross if every seed stopped.",
        f"Line charts for {len(shown)} methods: test accuracy on each of {tasks} tasks after each task was trained.",
        panels.figure,
    )


def axis_floor(values: Array) -> float:
    """Return the start of an accuracy axis: the multiple of ten below the smallest value."""
    finite = values[np.isfinite(values)]
    return float(min(np.floor(finite.min() / 10) * 10, 90)) if finite.size else 0.0


def labelled_tasks(tasks: int) -> list[int]:
    """Return the tasks to label: all of a few, otherwise the first, the last and some in between.

    Example:
        >>> labelled_tasks(5), labelled_tasks(20)
        ([1, 2, 3, 4, 5], [1, 5, 9, 13, 17, 20])
    """
    return sorted({1, tasks, *range(1, tasks + 1, -(-tasks // 6))} - ({tasks - 1} if tasks > 6 else set()))


def _lines(panel: Axes, stack: Array, colours: Sequence[str]) -> None:
    """Draw the lines of one method; `stack` has shape (seeds, tasks, tasks), NaN before a task was trained."""
    tasks = len(colours)
    steps = np.arange(1, tasks + 1)
    mean, std = mean_over_seeds(stack)
    paths, bands, inks = [], [], []
    for task, colour in enumerate(colours):
        scored = np.isfinite(mean[:, task])
        if scored.any():
            x, y, half = steps[scored], mean[scored, task], std[scored, task]
            paths.append(np.column_stack([x, y]))
            edge = np.append((y + half).clip(max=100), (y - half).clip(min=0)[::-1])
            bands.append(np.column_stack([np.append(x, x[::-1]), edge]))
            inks.append(colour)
    panel.add_collection(PolyCollection(bands, facecolors=inks, alpha=0.16, lw=0))
    panel.add_collection(LineCollection(paths, colors=inks, lw=0.9))
    panel.scatter([path[0, 0] for path in paths], [path[0, 1] for path in paths], s=5, c=inks, lw=0, zorder=3)
    so_far = np.array([row[:number].mean() for number, row in enumerate(mean, start=1)])
    panel.plot(steps, so_far, color=INK, lw=1.5, zorder=2)
    reached = int(np.isfinite(so_far).sum())
    if 0 < reached < tasks:
        panel.plot(reached, so_far[reached - 1], "x", color=INK, ms=5, mew=1.4, zorder=4)
