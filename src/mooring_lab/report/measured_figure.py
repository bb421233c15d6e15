"""A figure of a measured budget: what was measured in training, and what was named."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from mooring.errors import MooringError
from mooring.hold.measure import MeasuredPoint
from mooring_lab.report.style import FAINT, LINES, figure_style


def draw_measured(points: Sequence[MeasuredPoint], path: str | Path) -> Path:
    """Draw the measured forgetting over the steps, with the budget, one panel for each task, into a file.

    Args:
        points: `moor.measured_history`.
        path: the file, whose ending is its format: .png, .svg or .pdf.

    Example:
        >>> import tempfile
        >>> points = [MeasuredPoint(task=1, step=7 * i, nats=0.01 * i, named=0.1) for i in range(1, 9)]
        >>> draw_measured(points, Path(tempfile.mkdtemp()) / "measured.png").name
        'measured.png'
    """
    if not points:
        raise MooringError("nothing was measured: a budget is measured every few steps after a reference or a task")
    tasks = sorted({point.task for point in points})
    with figure_style():
        figure = Figure(figsize=(1.5 + 3.2 * len(tasks), 3.0))
        panels = figure.subplots(1, len(tasks), sharey=True, squeeze=False)[0]
        for panel, task in zip(panels, tasks, strict=True):
            own = [point for point in points if point.task == task]
            steps = [point.step for point in own]
            panel.plot(steps, [point.nats for point in own], color=LINES[0], lw=1.2, label="measured")
            panel.plot(steps, [point.named for point in own], color=FAINT, lw=1, ls="--", label="budget")
            panel.set(title=f"after task {task}" if len(tasks) > 1 else "", xlabel="step", ylim=(0, None))
        panels[0].set_ylabel("forgetting, nats")
        panels[-1].legend()
        figure.savefig(path, dpi=150, bbox_inches="tight")
    return Path(path)
