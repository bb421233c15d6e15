"""How every figure looks: inks that the page recolours for dark mode, and matplotlib's settings."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib
from matplotlib.colors import LinearSegmentedColormap, to_hex

__all__ = ["FAINT", "INK", "LINES", "PAPER", "RULE", "THEMED", "WIDTH", "drawing", "task_colours"]

INK, FAINT, RULE, PAPER = "#1f2428", "#656d76", "#dfe3e8", "#ffffff"
THEMED = {INK: "var(--ink)", FAINT: "var(--faint)", RULE: "var(--rule)", PAPER: "var(--paper)"}
"""What an inlined figure has in place of these colours. Nothing else may use them."""

LINES = ("#0a7bbd", "#d55e00", "#009e73", "#b65f93", "#d98c00", "#45a5e0", "#7d8590")
"""For lines told apart within one panel; each is also labelled where it ends."""

WIDTH = 10.0
"""Of every figure, in inches: all have the same scale on the page."""

_TASKS = LinearSegmentedColormap.from_list("tasks", ["#2f6fb5", "#2a9d8f", "#c29a1f", "#cf5a36"])

_SETTINGS: Any = {
    "axes.axisbelow": True,
    "axes.edgecolor": RULE,
    "axes.facecolor": "none",
    "axes.labelcolor": FAINT,
    "axes.labelsize": 7.5,
    "axes.linewidth": 0.7,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlesize": 8,
    "figure.facecolor": PAPER,
    "font.family": "sans-serif",
    # DejaVu comes with matplotlib: the layout is the same on every machine.
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 7.5,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.1,
    "savefig.facecolor": PAPER,
    "svg.fonttype": "none",
    "svg.hashsalt": "mooring",
    "text.color": INK,
    # A name with a dollar sign is a name, not mathematics.
    "text.parse_math": False,
    "xtick.color": RULE,
    "xtick.labelcolor": FAINT,
    "xtick.labelsize": 7,
    "xtick.major.size": 2.5,
    "xtick.major.width": 0.7,
    "ytick.color": RULE,
    "ytick.labelcolor": FAINT,
    "ytick.labelsize": 7,
    "ytick.major.size": 2.5,
    "ytick.major.width": 0.7,
}


@contextmanager
def drawing() -> Iterator[None]:
    """Matplotlib with these settings, whatever the user's own are; theirs come back afterwards."""
    with warnings.catch_warnings(), matplotlib.rc_context():
        # SVG text is drawn by the browser, which has the glyphs that DejaVu lacks.
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from")
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_SETTINGS)
        yield


def task_colours(tasks: int) -> Sequence[str]:
    """A colour for each task, from the first in blue to the last in red."""
    return [to_hex(_TASKS(task / max(tasks - 1, 1))) for task in range(tasks)]
