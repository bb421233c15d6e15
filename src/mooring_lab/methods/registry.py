"""The registry of methods."""

from collections.abc import Iterable
from types import MappingProxyType

from mooring.errors import MooringError, unknown
from mooring_lab.methods import (
    baselines,
    functional,
    interpolations,
    penalties,
    projections,
    proximal_steps,
    with_reference,
)
from mooring_lab.methods.groups import GROUPS, group_of
from mooring_lab.methods.imported import IMPORTED, import_method
from mooring_lab.methods.method import Method
from mooring_lab.methods.strengths import paper_strength

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

BUILT_IN = MappingProxyType({**METHODS, **VARIANTS})
"""The methods of this package, whatever a program puts into `METHODS`."""

ALIASES = {f"{form}vanilla": f"{form}uniform" for form in ("", "balanced-", "clamped-", "explicit-")}
"""The paper's names of methods."""


def find_method(name: str) -> Method:
    """Return the method of that name, or the one that `package.module:METHOD` names.

    Example:
        >>> find_method("explicit-mas").has_strength
        False
    """
    name = ALIASES.get(name, name)
    method = METHODS.get(name) or VARIANTS.get(name)
    if method is None and ":" in name:
        return import_method(name)
    if method is None:
        rule = f"`mooring methods` lists all {len(METHODS)}, and package.module:METHOD is one of your own"
        raise unknown("method", name, METHODS, rule)
    if method.name != name:
        entry = f"METHODS[{name!r}] holds the method {method.name!r}"
        raise MooringError(f"{entry}: key and name must agree, so change one of them")
    return method


def is_built_in(method: Method) -> bool:
    """Return whether a method is one of this package, and not one of your own under the same name.

    Example:
        >>> is_built_in(find_method("ewc")), is_built_in(Method("ewc", "a method of your own"))
        (True, False)
    """
    return BUILT_IN.get(method.name) is method


def own_methods(names: Iterable[str]) -> tuple[Method, ...]:
    """Return those of the named methods that are not of this package; another process has to be given them.

    Example:
        >>> own_methods(["plain", "ewc"])
        ()
    """
    return tuple(m for m in map(find_method, dict.fromkeys(names)) if not is_built_in(m))


def register(methods: Iterable[Method]) -> None:
    """Make methods of your own known under their names; those that were imported stay out of "all".

    Example:
        >>> register([])
    """
    for method in methods:
        (IMPORTED if ":" in method.name else METHODS)[method.name] = method


def default_strength(method: Method, *, paper: bool) -> float | None:
    """Return the strength of a method when the user gives none; a method of your own always has its own strength.

    With paper=True it is the paper's strength if there is one, as for every stream but the digits.

    Example:
        >>> default_strength(find_method("mas"), paper=False), default_strength(find_method("mas"), paper=True)
        (0.03, 0.01)
    """
    strength = paper_strength(method.name) if paper and method.has_strength and is_built_in(method) else None
    return method.strength if strength is None else strength


def method_rank(name: str) -> int:
    """Return the position of a method among all methods; variants are last, and after them those that were imported.

    Example:
        >>> method_rank("plain"), method_rank("explicit-ewc-cube") > method_rank("er")
        (0, True)
    """
    names = [*METHODS, *VARIANTS]
    name = find_method(name).name
    return names.index(name) if name in METHODS or name in VARIANTS else len(names)


def resolve_methods(names: str | list[str] | tuple[str, ...]) -> list[str]:
    """Return the names of methods without duplicates, in the given order.

    "all" stands for every method, and the key of a group, such as "start", for its methods.

    Example:
        >>> resolve_methods("plain,vanilla, plain")
        ['plain', 'uniform']
        >>> len(resolve_methods("start"))
        6
    """
    given = [name.strip() for name in (names.split(",") if isinstance(names, str) else names)]
    resolved = (method for name in given for method in _resolved(name))
    return list(dict.fromkeys(resolved))


def _resolved(name: str) -> Iterable[str]:
    """Return the methods that one name of a list stands for."""
    if name == "all":
        return METHODS
    return methods_in(name) if name in GROUPS else [find_method(name).name]


def methods_in(group: str) -> list[str]:
    """Return the methods of a group: those to begin with in their own order, others as `METHODS` has them.

    Example:
        >>> methods_in("start")[:2]
        ['budget-distil', 'budget-kronecker']
    """
    _, names = GROUPS[group]
    return [*names] or [name for name in METHODS if group_of(name) == group]
