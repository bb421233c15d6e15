"""Methods of your own, named as `package.module:METHOD`."""

from dataclasses import replace
from importlib import import_module

from mooring.errors import MooringError, first_line
from mooring_lab.methods.method import Method
from mooring_lab.model.source_stamp import source_stamp

IMPORTED: dict[str, Method] = {}
"""The methods that were imported, by their versioned names."""


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
