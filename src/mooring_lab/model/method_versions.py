"""The names of methods in tables: a method of your own has the hash of its source only where two versions are shown."""

from collections.abc import Iterable


def without_version(method: str) -> str:
    """Return the name of a method without the hash of its source.

    Example:
        >>> without_version("mine:METHOD@0badc0de"), without_version("plain")
        ('mine:METHOD', 'plain')
    """
    return method.partition("@")[0]


def names_in_table(methods: Iterable[str]) -> dict[str, str]:
    """Return the name of each method in a table of these methods: with its hash if another version is among them.

    Example:
        >>> names_in_table(["plain", "mine:A@11", "mine:B@11", "mine:B@22"])
        {'plain': 'plain', 'mine:A@11': 'mine:A', 'mine:B@11': 'mine:B@11', 'mine:B@22': 'mine:B@22'}
    """
    methods = tuple(dict.fromkeys(methods))
    names = [without_version(method) for method in methods]
    return {method: name if names.count(name) == 1 else method for method, name in zip(methods, names, strict=True)}
