"""Kinds of outputs: what a model's outputs are decides how they are measured and distilled."""

from collections.abc import Callable
from typing import Any

from mooring.errors import MooringError, unknown
from mooring.reference.kinds.classes import Classes
from mooring.reference.kinds.embedding import Embedding
from mooring.reference.kinds.kind import OutputKind
from mooring.reference.kinds.labels import Labels
from mooring.reference.kinds.own import Own
from mooring.reference.kinds.values import Values

Kind = str | OutputKind | Callable[[Any, Any], Any]
"""A kind by its name, an instance with options, or a function divergence(old_outputs, new_outputs)."""

KINDS: dict[str, type[OutputKind]] = {kind.name: kind for kind in (Classes, Labels, Values, Embedding)}
"""The kinds by name."""


def choose_kind(kind: Kind) -> OutputKind:
    """Return the kind that a user named.

    Example:
        >>> choose_kind("labels"), choose_kind(Classes(dimension=1))
        (Labels(), Classes(dimension=1))
    """
    if isinstance(kind, OutputKind):
        return kind
    if isinstance(kind, str):
        if kind not in KINDS:
            raise unknown("kind", kind, [*KINDS, "or a function divergence(old_outputs, new_outputs)"])
        return KINDS[kind]()
    if isinstance(kind, type) or not callable(kind):
        raise MooringError(
            f"kind={kind!r} is not allowed: give {', '.join(map(repr, KINDS))}, an instance such as "
            "mooring.kinds.Embedding(temperature=0.07), or a function divergence(old_outputs, new_outputs)"
        )
    return Own(kind)


__all__ = ["Classes", "Embedding", "Kind", "Labels", "OutputKind", "Own", "Values", "choose_kind"]
