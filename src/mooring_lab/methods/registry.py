"""The registry of methods: one line for each family."""

from collections.abc import Iterable
from importlib import import_module
from types import MappingProxyType

from mooring_lab.methods.groups import GROUPS, group_of
from mooring_lab.methods.strengths import paper_strength
from mooring_lab.model.known_methods import IMPORTED, METHODS, VARIANTS, find_method
from mooring_lab.model.method import Method

FAMILIES = (
    "controls",
    "penalties",
    "laplace",
    "interpolations",
    "merging",
    "proximal_steps",
    "projections",
    "replay",
    "as_published",
    "mir",
    "budgets",
    "lwf",
    "der",
)
"""Packages beside this module, each with `METHODS`, `VARIANTS` or both, in the order of lists."""

for _family in FAMILIES:
    _declared = import_module(f"mooring_lab.methods.{_family}")
    METHODS.update({method.name: method for method in getattr(_declared, "METHODS", ())})
    VARIANTS.update({method.name: method for method in getattr(_declared, "VARIANTS", ())})

BUILT_IN = MappingProxyType({**METHODS, **VARIANTS})
"""The methods of this package, whatever a program puts into `METHODS`."""


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
    if names:
        return [name for name in names if name in METHODS]
    return [name for name, method in METHODS.items() if group_of(method) == group]
