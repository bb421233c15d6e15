"""Methods by name: those that `mooring_lab.methods` declares, and your own, named as `package.module:METHOD`."""

from dataclasses import replace
from importlib import import_module

from mooring.errors import MooringError, first_line, unknown
from mooring_lab.model.method import Method
from mooring_lab.model.source_stamp import source_stamp

DECLARATIONS = "mooring_lab.methods"
"""The package that fills `METHODS`. It is above this one, so that it is imported by its name."""

METHODS: dict[str, Method] = {}

VARIANTS: dict[str, Method] = {}
"""Variants for single experiments; they can be named but are not listed."""

IMPORTED: dict[str, Method] = {}
"""The methods that were imported, by their versioned names."""

ALIASES = {f"{form}vanilla": f"{form}uniform" for form in ("", "balanced-", "clamped-", "explicit-")}
"""The paper's names of methods."""


def find_method(name: str) -> Method:
    """Return the method of that name, or the one that `package.module:METHOD` names.

    Example:
        >>> find_method("explicit-mas").has_strength
        False
    """
    if not METHODS:
        import_module(DECLARATIONS)
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


def method_rank(name: str) -> int:
    """Return the position of a method among all methods; variants are last, and after them those that were imported.

    Example:
        >>> method_rank("plain"), method_rank("explicit-ewc-cube") > method_rank("er")
        (0, True)
    """
    name, names = find_method(name).name, [*METHODS, *VARIANTS]
    return names.index(name) if name in METHODS or name in VARIANTS else len(names)


def import_method(name: str) -> Method:
    """Return the method that `package.module:METHOD` names, under that name and a hash of its source.

    The hash covers the module and the local modules that it imports: a method that was changed is another method, and
    its runs are trained again.

    Args:
        name: the module, a colon and the method's name in it; a hash behind an @ must be the present one.
    """
    if name in IMPORTED:
        return IMPORTED[name]
    path, _, version = name.partition("@")
    module, _, attribute = path.partition(":")
    module = module.removesuffix(".py")
    try:
        method = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise MooringError(f"method {path!r} cannot be imported: {first_line(error)}") from error
    if not isinstance(method, Method):
        raise MooringError(f"{path!r} is a {type(method).__name__}: give a mooring_lab.methods.Method")
    versioned = f"{module}:{attribute}@{source_stamp(module)}"
    if version and name != versioned:
        raise MooringError(f"{path!r} was changed since a run of it was stored: name it without @{version}")
    IMPORTED[versioned] = replace(method, name=versioned)
    return IMPORTED[versioned]
