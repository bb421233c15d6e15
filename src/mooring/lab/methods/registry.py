"""The registry of methods."""

from mooring.errors import MooringError, unknown
from mooring.lab.methods import (
    baselines,
    functional,
    interpolations,
    penalties,
    projections,
    proximal_steps,
    with_reference,
)
from mooring.lab.methods.method import Method

FAMILIES = (
    baselines.CONTROLS,
    penalties.METHODS,
    penalties.MATCHED,
    interpolations.METHODS,
    proximal_steps.METHODS,
    projections.METHODS,
    baselines.REPLAY,
    with_reference.METHODS,
    functional.METHODS,
)
METHODS: dict[str, Method] = {method.name: method for family in FAMILIES for method in family}

VARIANTS = {m.name: m for m in (*interpolations.VARIANTS, *penalties.VARIANTS, *baselines.VARIANTS)}
"""Variants for single experiments; they can be named but are not listed."""

ALIASES = {f"{form}vanilla": f"{form}uniform" for form in ("", "balanced-", "clamped-", "explicit-")}
"""The paper's names of methods."""


def find_method(name: str) -> Method:
    """Return the method of that name.

    Example:
        >>> find_method("explicit-mas").has_strength
        False
    """
    name = ALIASES.get(name, name)
    method = METHODS.get(name) or VARIANTS.get(name)
    if method is None:
        raise unknown("method", name, METHODS)
    if method.name != name:
        entry = f"METHODS[{name!r}] holds the method {method.name!r}"
        raise MooringError(f"{entry}: key and name must agree, so change one of them")
    return method


def method_rank(name: str) -> int:
    """Return the position of a method among all methods, variants last; it is used to sort runs by method.

    Example:
        >>> method_rank("plain"), method_rank("explicit-ewc-cube") > method_rank("er")
        (0, True)
    """
    return [*METHODS, *VARIANTS].index(find_method(name).name)


def resolve_methods(names: str | list[str] | tuple[str, ...]) -> list[str]:
    """Return the names of methods without duplicates, in the given order; "all" stands for every method.

    Example:
        >>> resolve_methods("plain,vanilla, plain")
        ['plain', 'uniform']
    """
    given = [name.strip() for name in (names.split(",") if isinstance(names, str) else names)]
    resolved = (method for name in given for method in (METHODS if name == "all" else [find_method(name).name]))
    return list(dict.fromkeys(resolved))
