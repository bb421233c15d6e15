"""Every method by name."""

from mooring.errors import MooringError, unknown
from mooring.lab.methods import budgets as budget
from mooring.lab.methods import controls, explicit, merging, penalties, replay
from mooring.lab.methods import proximal_steps as proximal
from mooring.lab.methods.method import Method

__all__ = ["ALIASES", "METHODS", "VARIANTS", "find_method", "method_rank", "resolve_methods"]

METHODS: dict[str, Method] = {
    method.name: method
    for family in (controls, penalties, explicit, merging, proximal, budget, replay)
    for method in family.METHODS
}

VARIANTS: dict[str, Method] = {
    method.name: method for method in (*explicit.VARIANTS, *penalties.VARIANTS, *replay.VARIANTS)
}
"""Forms that single experiments need: known by name, and in no list."""

ALIASES = {f"{form}vanilla": f"{form}uniform" for form in ("", "balanced-", "clamped-", "explicit-")}
"""The paper's names."""


def find_method(name: str) -> Method:
    """The method of that name.

    Example:
        >>> find_method("explicit-mas").has_strength
        False
    """
    name = ALIASES.get(name, name)
    found = METHODS.get(name) or VARIANTS.get(name)
    if found is None:
        raise unknown("method", name, METHODS)
    if found.name != name:
        raise MooringError(
            f"METHODS[{name!r}] holds the method {found.name!r}: key and name must agree, so change one of them"
        )
    return found


def method_rank(name: str) -> int:
    """The place of a method among all, variants last: runs of one method lie next to each other.

    Example:
        >>> method_rank("plain"), method_rank("explicit-ewc-cube") > method_rank("er")
        (0, True)
    """
    return [*METHODS, *VARIANTS].index(find_method(name).name)


def resolve_methods(names: str | list[str] | tuple[str, ...]) -> list[str]:
    """Names of methods from a list of them; "all" stands for every one. Each is named once, in the order given.

    Example:
        >>> resolve_methods("plain,vanilla, plain")
        ['plain', 'uniform']
    """
    given = names.split(",") if isinstance(names, str) else list(names)
    found: list[str] = []
    for name in (part.strip() for part in given):
        found += list(METHODS) if name == "all" else [find_method(name).name]
    return list(dict.fromkeys(found))
