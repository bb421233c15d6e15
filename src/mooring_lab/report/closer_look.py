"""A scatter plot in one panel, or in two if its best points are crowded: all of it, and a closer look at the best."""

from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from mooring_lab.report.panel_grid import Margins, add_panels
from mooring_lab.report.section import Array
from mooring_lab.report.style import FAINT, LEGEND_ROW, METHOD_COLUMNS, add_legend, legend_height

MARGINS = Margins(left=0.55, right=0.1, top=0.35 - LEGEND_ROW, bottom=0.45, across=0.62, between=0.62)

FEW_POINTS, CROWDED_SHARE = 10, 0.25
"""With more points, the better half gets a panel of its own if it fills less than this share of the first one."""


def scatter(
    points: Array,
    box: Array,
    draw: Callable[[Axes, Array], None],
    height: float,
    marks: Sequence[tuple[Line2D, str]],
) -> tuple[Figure, str]:
    """Return a figure of points with a legend of methods, and a text for its caption.

    Args:
        points: positions of shape (points, 2), the best first.
        box: the limits of the axes, ((left, right), (low, high)).
        draw: a function that draws into a panel with these limits.
        height: the height of a panel with its margins, in inches.
        marks: the entries of its legend.
    """
    boxes = [box]
    if len(points) > FEW_POINTS:
        closer = limits(points[: -(-len(points) // 2)])
        boxes += [closer] * bool((np.diff(closer) / np.diff(box)).prod() < CROWDED_SHARE)
    legend = legend_height(len(marks), METHOD_COLUMNS) + LEGEND_ROW * (len(boxes) - 1)
    inner = height - MARGINS.top - MARGINS.bottom
    grid = add_panels(len(boxes), len(boxes), lambda width: inner, MARGINS, legend)
    for panel, here in zip(grid.axes, boxes, strict=True):
        panel.grid()
        panel.set(xlim=here[0], ylim=here[1])
        draw(panel, here)
        for axis, (low, high) in zip((panel.xaxis, panel.yaxis), here, strict=True):
            axis.set_ticks([tick for tick in axis.get_ticklocs() if max(low, 0) <= tick <= min(high, 100)])
        panel.set(xlim=here[0], ylim=here[1])
    add_legend(grid.figure, marks, METHOD_COLUMNS)
    if len(boxes) == 1:
        return grid.figure, ""
    corner, side = boxes[1][:, 0], np.diff(boxes[1])[:, 0]
    grid.axes[0].add_patch(Rectangle(tuple(corner), side[0], side[1], fill=False, ec=FAINT, lw=0.7, zorder=4))
    grid.axes[1].set_title("the frame on a larger scale", loc="left", size=7.5, color=FAINT)
    return grid.figure, " The second panel shows the frame of the first on a larger scale."


def limits(points: Array) -> Array:
    """Return the limits of axes that hold these points with a margin.

    Example:
        >>> limits(np.array([[0.0, 90.0], [50.0, 100.0]])).tolist()
        [[-4.0, 54.0], [89.2, 100.8]]
    """
    low, high = points.min(0), points.max(0)
    margin = np.maximum(0.08 * (high - low), 0.5)
    return np.column_stack([low - margin, high + margin])
