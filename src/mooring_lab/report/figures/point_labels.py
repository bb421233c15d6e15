"""Label the points of a panel, the first ones first, without covering another label or point."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.font_manager import FontProperties, findfont, get_font

from mooring_lab.report.figures.labels import OWNED_DISTANCE, SAME_POINT, place_labels
from mooring_lab.report.section import Array
from mooring_lab.report.style import FAINT, INK, PAPER

FONT_SIZE = 7.0
LINE_HEIGHT = 1.25 * FONT_SIZE


def label_points(panel: Axes, points: Array, names: Sequence[str | None], size: tuple[float, float]) -> int:
    """Label points within the limits of a panel, with a line to a label that is far away.

    Args:
        panel: the panel, whose limits are set here for good.
        points: positions in the coordinates of the panel, the most important first, of shape (points, 2).
        names: their labels; None for a point whose marker is to be avoided only.
        size: the size of the panel in typographic points.

    Returns:
        How many of the points have no label, because there is no room for it.
    """
    (left, right), (low, high) = panel.get_xlim(), panel.get_ylim()
    panel.set(xlim=(left, right), ylim=(low, high))
    corner, scale = np.array([left, low]), np.array([right - left, high - low]) / np.array(size)
    spots = (points - corner) / scale
    inside = np.flatnonzero(((spots >= 0) & (spots <= np.array(size))).all(1)).tolist()
    labels = {member: name for member in inside if (name := names[member]) is not None}
    groups = _groups(spots, list(labels))
    texts = [_joined([labels[member] for member in group]) for group in groups]
    widths = [_width(text) for text in texts]
    firsts = spots[[group[0] for group in groups]]
    middles = place_labels(firsts, widths, LINE_HEIGHT, size, spots[inside])
    without = 0
    for group, text, point, middle, width in zip(groups, texts, firsts, middles, widths, strict=True):
        if np.isnan(middle).any():
            without += len(group)
            continue
        half = np.array([width, LINE_HEIGHT]) / 2
        nearest = np.clip(point, middle - half, middle + half)
        # Aligned at the side of the point: the widths are estimates, and fonts differ.
        side = int(np.sign(point[0] - middle[0])) if abs(point[0] - middle[0]) >= width / 2 else 0
        x, y = corner + (middle + half * (side, 0)) * scale
        align = {-1: "left", 0: "center", 1: "right"}[side]
        paper = {"facecolor": PAPER, "edgecolor": "none", "alpha": 0.7, "pad": 0.4}
        panel.text(x, y, text, size=FONT_SIZE, ha=align, va="center_baseline", color=INK, zorder=5, bbox=paper)
        if np.hypot(*(nearest - point)) > OWNED_DISTANCE:
            ends = corner + np.array([point, nearest]) * scale
            panel.plot(ends[:, 0], ends[:, 1], color=FAINT, lw=0.6, zorder=3)
    return without


def _groups(spots: Array, members: Sequence[int]) -> list[list[int]]:
    """Return the points that coincide, by the first of them, in their order."""
    groups: list[list[int]] = []
    for member in members:
        near = (group for group in groups if np.hypot(*(spots[group[0]] - spots[member])) < SAME_POINT)
        if (group := next(near, None)) is None:
            groups.append([member])
        else:
            group.append(member)
    return groups


def _width(text: str) -> float:
    """Return the width of a text in typographic points, in the font of the figures, which is a wide one."""
    font = get_font(findfont(FontProperties(family="DejaVu Sans")))
    font.set_size(FONT_SIZE, 72)
    font.set_text(text)
    return float(font.get_width_height()[0]) / 64 + 1


def _joined(names: Sequence[str]) -> str:
    """Return the label of points that coincide.

    Example:
        >>> _joined(["imm-mode", "cofima"]), _joined(["si", "si-absolute", "si-signed", "si-negative"])
        ('imm-mode, cofima', 'si + 3 more')
    """
    joined = ", ".join(names)
    return joined if len(names) < 3 and len(joined) <= 32 else f"{names[0]} + {len(names) - 1} more"
