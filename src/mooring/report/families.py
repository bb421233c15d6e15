"""Which family a method belongs to, and how the family looks in every figure and table."""

from dataclasses import dataclass

__all__ = ["FAMILIES", "Family", "family_of"]


@dataclass(frozen=True)
class Family:
    """Methods of one kind.

    Attributes:
        name: one word.
        colour: after Okabe and Ito, told apart with any colour vision; each is legible on white and on near-black.
        marker: of matplotlib, so that colour is never the only difference.
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
    Family("replay", "#d55e00", "X"),
    Family("unknown", "#9c8b6e", "*"),
)
"""Every family, in the order of figures and legends."""

_BY_NAME = {family.name: family for family in FAMILIES}
_SIGNS = ("si", "si-absolute", "si-signed", "si-negative", "si-flipped")
_METHODS = {
    "controls": ("plain", "frozen", "frozen-after-first", "joint"),
    "penalty": ("ewc", "mas", "rwalk", "uniform", "random", "l2-sp", *_SIGNS),
    "explicit": tuple(f"soft-{name}" for name in ("ewc", "mas", "si", "rwalk")),
    "merging": ("sfa", "wise-ft", "imm-mean", "imm-mode", "cofima"),
    "replay": ("a-gem", "a-gem-256", "er"),
}
_PREFIXES = ("clamped", "balanced", "explicit", "proximal", "budget")


def family_of(method: str) -> Family:
    """The family of a method, by its name; "unknown" for a name that no family claims.

    Example:
        >>> family_of("balanced-ewc").name, family_of("er").name, family_of("mine").name
        ('balanced', 'replay', 'unknown')
    """
    for name, methods in _METHODS.items():
        if method in methods:
            return _BY_NAME[name]
    prefix, dash, rest = method.partition("-")
    return _BY_NAME[prefix if dash and rest and prefix in _PREFIXES else "unknown"]
