"""Groups of methods: which to begin with, the controls of a comparison, other published methods, and variants."""

from mooring_lab.model.method import Method

START = ("budget-distil", "budget-kronecker", "proximal-ewc", "explicit-ewc", "der++", "ewc")
"""The six methods to begin with: five that docs/choose.md recommends, and the penalty of most papers."""

GROUPS = {
    "start": ("start with these six", START),
    "controls": ("controls: what a method should beat", ()),
    "published": ("other published methods", ()),
    "variants": ("variants, which change one thing about a method above", ()),
}
"""Title of each group, by its key, and its methods where their declarations do not say it."""


def group_of(method: Method) -> str:
    """Return the key of a method's group.

    Example:
        >>> group_of(Method("mine", "a method of your own"))
        'variants'
    """
    return "start" if method.name in START else method.group
