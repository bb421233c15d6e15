"""Groups of methods: which to begin with, the controls of a comparison, other published methods, and variants."""

START = ("budget-distil", "budget-kronecker", "proximal-ewc", "explicit-ewc", "der++", "ewc")
"""The six methods to begin with: five that docs/choose.md recommends, and the penalty of most papers."""

CONTROLS = (
    *("plain", "frozen", "frozen-after-first", "joint"),
    *(f"{form}{name}" for name in ("uniform", "random") for form in ("", "balanced-", "clamped-", "explicit-")),
)
"""Methods that should be beaten: no protection, no training, all data at once, and importances that know nothing."""

PUBLISHED = (
    *("mas", "si", "rwalk", "explicit-mas", "explicit-si", "explicit-rwalk", "l2-sp", "laplace-kronecker"),
    *("sfa", "wise-ft", "imm-mean", "imm-mode", "cofima", "gpm", "nscl", "owm", "ftp", "tpgm", "er", "a-gem", "lwf"),
)
"""Other methods of papers; most have pages that say what was published and what comes out here."""

GROUPS = {
    "start": ("start with these six", START),
    "controls": ("controls: what a method should beat", CONTROLS),
    "published": ("other published methods", PUBLISHED),
    "variants": ("variants, which change one thing about a method above", ()),
}
"""Title and methods of each group, by its key; the variants are all methods that no other group names."""


def group_of(name: str) -> str:
    """Return the key of a method's group.

    Example:
        >>> group_of("budget-kronecker"), group_of("plain"), group_of("clamped-mas")
        ('start', 'controls', 'variants')
    """
    return next((key for key, (_, names) in GROUPS.items() if name in names), "variants")
