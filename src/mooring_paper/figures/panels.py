"""Parts of panels that several figures draw: lines over layers and rows of stability marks."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from posixpath import commonpath

from matplotlib.axes import Axes

from mooring_lab.model.metrics import Interval
from mooring_lab.report.style import INK, LINES


@dataclass(frozen=True)
class LayerLine:
    """A measure by layer.

    Attributes:
        name: the name in the legend.
        layers: the interval of each layer, by name.
        colour: an index of the palette.
        style: the line style of matplotlib.
    """

    name: str
    layers: Mapping[str, Interval]
    colour: int
    style: str = "-"


def value_range(lines: Iterable[Mapping[str, Interval]]) -> tuple[float, float]:
    """Return the lowest and the highest mean over lines and layers, with a margin."""
    means = [value.mean for layers in lines for value in layers.values()]
    margin = 0.15 * (max(means) - min(means)) or 0.05
    return min(means) - margin, max(means) + margin


def draw_layer_lines(panel: Axes, lines: Sequence[LayerLine], limits: tuple[float, float]) -> None:
    """Draw lines over layers with their intervals, and a legend beside them, between limits of the y axis."""
    layers = list(dict.fromkeys(layer for line in lines for layer in line.layers))
    low, high = limits
    panel.set_ylim(low, high)
    parent = commonpath([layer.rpartition(".")[0].replace(".", "/") for layer in layers]).replace("/", ".")
    panel.set_xticks(range(len(layers)), [layer.removeprefix(f"{parent}.") for layer in layers])
    panel.set_xlabel(f"layer of {parent}" if parent else "layer")
    panel.set_xlim(-0.1, len(layers) - 0.9)
    panel.grid(axis="y")
    for index, line in enumerate(lines):
        colour = LINES[line.colour % len(LINES)]
        x = [layers.index(layer) for layer in line.layers]
        y = [value.mean for value in line.layers.values()]
        panel.plot(x, y, line.style, marker="o", ms=2.5, color=colour, label=line.name)
        for position, value in zip(x, line.layers.values(), strict=True):
            if not math.isnan(value.low):
                # Offset, so that the intervals of several lines at the same layer do not overlap.
                bar_x = position + 0.006 * len(layers) * (index - (len(lines) - 1) / 2)
                panel.vlines(bar_x, value.low, value.high, color=colour, lw=0.8, alpha=0.5)
    panel.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=7, labelspacing=0.3, borderaxespad=0)


def draw_stability_marks(panel: Axes, x: Sequence[float], y: float, unstable: Sequence[bool], colour: str) -> None:
    """Draw a row of marks: a dot where training was stable with every seed, a cross where it was not."""
    dots = [position for position, crossed in zip(x, unstable, strict=True) if not crossed]
    crosses = [position for position, crossed in zip(x, unstable, strict=True) if crossed]
    panel.plot(dots, [y] * len(dots), "o", color=colour, ms=3.2, mew=0, clip_on=False)
    panel.plot(crosses, [y] * len(crosses), "x", color=INK, ms=4.6, mew=1.2, clip_on=False)
