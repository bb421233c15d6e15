"""Labels of points: each stands beside its own marker, and its leader keeps away from the markers of others."""

import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from mooring_lab.report.figures.closer_look import scatter
from mooring_lab.report.figures.labels import place_labels
from mooring_lab.report.style import NARROW, WIDE, figure_style

FIGURES = Path(__file__).parents[3] / "docs" / "figures"
HALF_MARKER = 3.0
COINCIDENT = 2.0
TOUCHING = 5.0
"""In typographic points: half a marker, how near markers share a label, and how near a box touches a marker."""


def gap(low, high, marker):
    """Return the distance from a marker's centre to a box."""
    return float(np.hypot(*np.maximum(np.maximum(low - marker, marker - high), 0)))


def distance(start, end, marker):
    """Return the distance from a marker's centre to a line."""
    length = float(((end - start) ** 2).sum())
    share = float((marker - start) @ (end - start)) / length if length else 0.0
    return float(np.hypot(*(start + min(max(share, 0.0), 1.0) * (end - start) - marker)))


def faults(own, others, low, high, leader):
    """Return how a label misleads, for each marker of another point.

    Args:
        own: the position of the label's point.
        others: the positions of all points; those that coincide with its own count as its own.
        low: the lower left corner of its box.
        high: the upper right corner of its box.
        leader: the ends of its line; None without one.
    """
    found = []
    for other in others[np.hypot(*(others - own).T) > COINCIDENT]:
        apart = float(np.hypot(*(other - own)))
        if leader is not None and distance(*leader, other) < min(HALF_MARKER, apart) - 0.1:
            found.append(f"its leader meets the marker at {other.round(1)}")
        if leader is None and gap(low, high, other) < gap(low, high, own):
            found.append(f"it is nearer to the marker at {other.round(1)}")
        if gap(low, high, other) < TOUCHING:
            found.append(f"it touches the marker at {other.round(1)}")
    return found


def drawn_faults(figure, points, names):
    """Return how the labels of a figure of points mislead, and the number of points that are labelled."""
    canvas, scale, found, labelled = FigureCanvasAgg(figure), 72 / figure.dpi, [], 0
    for panel in figure.axes:
        spots, frame = panel.transData.transform(points) * scale, panel.get_window_extent()
        shown = ((spots >= np.array(frame.min) * scale) & (spots <= np.array(frame.max) * scale)).all(1)
        leaders = [panel.transData.transform(line.get_xydata()) * scale for line in panel.lines]
        for text in panel.texts:
            label = text.get_text()
            index = next(
                i for i, name in enumerate(names) if label == name or label.startswith((f"{name}, ", f"{name} +"))
            )
            box = text.get_window_extent(canvas.get_renderer())
            low, high = np.array(box.min) * scale, np.array(box.max) * scale
            leader = next((ends for ends in leaders if np.hypot(*(ends[0] - spots[index])) < 0.01), None)
            found += [f"{label}: {fault}" for fault in faults(spots[index], spots[shown], low, high, leader)]
            labelled += 1
    return found, labelled


def nothing(panel, box):
    """Draw no paths."""


def stored(name):
    """Return kept and learned accuracy of the stored methods at their chosen settings, and their labels."""
    content = json.loads((FIGURES / f"frontier-{name}.json").read_text())[0]
    best = [method["best"] for method in content["methods"] if "forgetting" in method["best"]["metrics"]]
    points = [[100 - row["metrics"]["forgetting"]["mean"], row["metrics"]["learned"]["mean"]] for row in best]
    names = [row["method"] if row["strength"] is None else f"{row['method']} {row['strength']:g}" for row in best]
    return np.array(points), names


@pytest.mark.parametrize("layout", [WIDE, NARROW])
@pytest.mark.parametrize("name", ["digits", "permutations", "rotations", "fifty"])
def test_labels_of_stored_frontiers_belong_to_one_marker(name, layout):
    points, names = stored(name)
    box = np.array([[points[:, 0].min() - 1, 100.8], [points[:, 1].min() - 1, points[:, 1].max() + 1.5]])
    with figure_style():
        figure, _ = scatter(points, names, box, nothing, layout, 6.0, 12)
    found, labelled = drawn_faults(figure, points, names)
    assert found == []
    assert labelled > 0.6 * len(points)


def test_leader_passes_beside_the_markers_of_a_row():
    # Three markers stand 13 points apart on a line, as budget-distil and der++ do on two digits at a time.
    points = np.array([[113.0, 100.0], [100.0, 100.0], [126.0, 100.0]])
    halves = np.array([40.0, 4.5])
    middles = place_labels(points, [80.0] * 3, 9.0, (300.0, 200.0))
    assert np.isfinite(middles).all()
    for own, middle in zip(points, middles, strict=True):
        end = np.clip(own, middle - halves, middle + halves)
        assert faults(own, points, middle - halves, middle + halves, (own, end)) == []


@pytest.mark.parametrize("seed", range(8))
def test_labels_of_a_cluster_belong_to_one_marker(seed):
    points = np.random.default_rng(seed).normal(200, 20, (12, 2))
    halves = np.array([35.0, 4.5])
    middles = place_labels(points, [70.0] * 12, 9.0, (400.0, 400.0))
    assert np.isfinite(middles).sum() >= 11
    for own, middle in zip(points, middles, strict=True):
        if np.isfinite(middle).all():
            end = np.clip(own, middle - halves, middle + halves)
            leader = (own, end) if np.hypot(*(own - end)) > 8 else None
            assert faults(own, points, middle - halves, middle + halves, leader) == []


def test_label_keeps_away_from_markers_that_have_no_label_themselves():
    own = np.array([[50.0, 50.0]])
    other = np.array([[70.0, 50.0]])
    (middle,) = place_labels(own, [40.0], 9.0, (200.0, 100.0), other)
    halves = np.array([20.0, 4.5])
    assert faults(own[0], other, middle - halves, middle + halves, None) == []
