"""A hash of a module's source and of the local modules that it imports: changed code is another network or method."""

import ast
import hashlib
import importlib.util
import sys
import sysconfig
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import mooring

INSTALLED = ("site-packages", "dist-packages")
"""Names of folders whose modules are installed: their versions are recorded with each result instead."""

STAMP_BYTES = 4


def source_stamp(module: str, *more: str) -> str:
    """Return a short hash of the sources of a module and of all local modules that it imports, also indirectly.

    A module is local unless it belongs to Python, is installed, or is part of this package. Modules whose names are
    computed while the program runs are not found.

    Args:
        module: the module's name; it is imported.
        more: what else the hash depends on.

    Example:
        >>> source_stamp("json", "one") == source_stamp("json", "two")
        False
    """
    import_module(module)
    digest = hashlib.blake2b(repr(more).encode(), digest_size=STAMP_BYTES)
    sources: dict[str, bytes] = {}
    _collect(module, sources)
    for _, source in sorted(sources.items()):
        digest.update(repr(source).encode())
    return digest.hexdigest()


def _collect(module: str, sources: dict[str, bytes]) -> None:
    """Add the source of a local module, of the packages that it is in, and of everything local that it imports."""
    if module in sources:
        return
    path = _local_file(module)
    if path is None:
        return
    sources[module] = path.read_bytes()
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    if parent := module.rpartition(".")[0]:
        _collect(parent, sources)
    for name in _imported_names(ast.parse(sources[module]), package):
        _collect(name, sources)


def _imported_names(tree: ast.Module, package: str) -> Iterator[str]:
    """Yield the modules that a source imports, also inside functions; some of the names may not be modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            base = parents[: len(parents) + 1 - node.level] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            yield name
            yield from (f"{name}.{alias.name}" for alias in node.names)


def _local_file(module: str) -> Path | None:
    """Return the source file of a module; None if the module is not local or does not exist."""
    try:
        loaded = sys.modules.get(module)
        spec = None if loaded is not None else importlib.util.find_spec(module)
    except (ImportError, ValueError, AttributeError):
        return None
    file = getattr(loaded, "__file__", None) if loaded is not None else spec and spec.origin
    if not isinstance(file, str) or not file.endswith(".py") or not Path(file).is_file():
        return None
    path = Path(file).resolve()
    own, standard = Path(mooring.__file__).resolve().parent, Path(sysconfig.get_paths()["stdlib"]).resolve()
    foreign = path.is_relative_to(own) or path.is_relative_to(standard) or any(part in INSTALLED for part in path.parts)
    return None if foreign else path
