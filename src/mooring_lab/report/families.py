"""Families of methods, each with its colour and marker in figures and tables."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from mooring_lab.methods import METHODS
from mooring_lab.model.known_methods import VARIANTS


@dataclass(frozen=True)
class Family:
    """A kind of method.

    Attributes:
        name: one word.
        colour: from a palette after Okabe and Ito that suits colour-blind readers; legible on white and near-black.
        marker: the matplotlib marker, so that families differ in more than colour.
    """

    name: str
    colour: str
    marker: str


FAMILIES = (
    Family("controls", "#7d8590", "s"),
    Family("penalty", "#0a7bbd", "o"),
    Family("clamped", "#45a5e0", "v"),
    Family("balanced", "#d98c00", "D"),
    Family("explicit", "#009e73", "^"),
    Family("merging", "#8c6d31", "h"),
    Family("proximal", "#b65f93", "P"),
    Family("budget", "#6a51a3", "p"),
    Family("outputs", "#2a8f9e", "<"),
    Family("projection", "#b03060", "d"),
    Family("replay", "#d55e00", "X"),
    Family("own", "#9c8b6e", "*"),
)
"""All families, in the order of figures and legends."""

_BY_NAME = {family.name: family for family in FAMILIES}
_SIGNS = ("si", "si-absolute", "si-signed", "si-negative", "si-flipped")
_METHODS = {
    "controls": ("plain", "frozen", "frozen-after-first", "joint"),
    "penalty": ("ewc", "mas", "rwalk", "uniform", "random", "l2-sp", "summed-ewc", "laplace-kronecker", *_SIGNS),
    "explicit": tuple(f"soft-{name}" for name in ("ewc", "mas", "si", "rwalk")),
    "merging": ("sfa", "wise-ft", "imm-mean", "imm-mode", "cofima"),
    "outputs": ("lwf",),
    "projection": ("gpm", "nscl", "owm", "ftp", "tpgm"),
}
_PREFIXES = {
    "plain": "controls",
    **{name: name for name in ("clamped", "balanced", "explicit", "proximal", "budget")},
}


def family_of(method: str) -> Family:
    """Return the family of a method, by its name; "replay" for others with a memory, "own" for a method of your own.

    Example:
        >>> family_of("balanced-ewc").name, family_of("a-gem-256").name, family_of("mine:METHOD").name
        ('balanced', 'replay', 'own')
    """
    if ":" in method:
        return _BY_NAME["own"]
    for name, methods in _METHODS.items():
        if method in methods:
            return _BY_NAME[name]
    declared = METHODS.get(method) or VARIANTS.get(method)
    other = "replay" if declared is not None and declared.memory else "own"
    families = (name for prefix, name in _PREFIXES.items() if method.removeprefix(f"{prefix}-") not in (method, ""))
    return _BY_NAME[next(families, other)]


SHAPES = ("o", "s", "^", "D", "v", "P", "X", "*", "<")
"""Markers that are easy to tell apart, filled and then hollow, for the methods of one family."""


def point_styles(methods: Iterable[str]) -> list[dict[str, Any]]:
    """Return the options with which matplotlib draws the points of each method.

    The colour is that of the family; the first method of a family has its marker, and each later one another.

    Example:
        >>> [style["marker"] for style in point_styles(["ewc", "mas", "plain", "si"])]
        ['o', 's', 's', '^']
    """
    counts: Counter[str] = Counter()
    styles = []
    for family in map(family_of, methods):
        shapes = (family.marker, *(shape for shape in SHAPES if shape != family.marker))
        row, column = divmod(counts[family.name], len(shapes))
        counts[family.name] += 1
        inside = {"mfc": "none", "mew": 1.0} if row else {"mew": 0.0}
        styles.append({"marker": shapes[column], "color": family.colour, **inside})
    return styles
