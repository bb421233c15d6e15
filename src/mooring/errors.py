"""The errors a user meets: one line each, with what is wrong, what is allowed and what to do."""

import difflib
from collections.abc import Iterable

__all__ = ["MooringError", "NonFiniteError", "unknown"]


class MooringError(ValueError):
    """Something was asked for that Mooring refuses; nothing has been changed."""


class NonFiniteError(MooringError):
    """A loss, gradient or pull is not finite; the step was stopped before anything was changed."""


def unknown(kind: str, given: object, allowed: Iterable[str]) -> MooringError:
    """The error for a name that is not in a list, with the nearest one that is.

    Example:
        >>> print(unknown("importance", "ewk", ["ewc", "mas"]))
        unknown importance 'ewk' (did you mean 'ewc'?); allowed: ewc, mas
    """
    names = list(allowed)
    near = difflib.get_close_matches(str(given), names, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return MooringError(f"unknown {kind} {given!r}{hint}; allowed: {', '.join(names)}")
