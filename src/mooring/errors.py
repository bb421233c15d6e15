"""Error classes and checks of options. An error is one line: what is wrong, what is allowed, what to do."""

import difflib
import math
import sys
import warnings
from collections.abc import Iterable

INTERNAL = "mooring", "torch", "contextlib"
"""The packages that are passed over in search of the line that a warning is about."""


class MooringError(ValueError):
    """A request that Mooring refuses; nothing has been changed."""


class NonFiniteError(MooringError):
    """A loss, gradient or pull that is not finite; the step stopped before anything was changed."""


class UnheldWarning(UserWarning):
    """A warning that training moves, or will move, parameters that nothing holds.

    `warnings.simplefilter("ignore", mooring.errors.UnheldWarning)` silences it.
    """


class ReturnedWarning(UserWarning):
    """A warning that the end of a task gave up a part of what was learned, because the budget was not kept otherwise.

    `warnings.simplefilter("ignore", mooring.errors.ReturnedWarning)` silences it.
    """


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn of the nearest line that is neither Mooring's nor torch's, such as one that calls `optimizer.step()`.

    Example:
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     warn("the budget is large")
        >>> print(caught[0].message)
        the budget is large
    """
    frame, level = sys._getframe(), 1
    while frame.f_globals.get("__name__", "").partition(".")[0] in INTERNAL and frame.f_back is not None:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def announce(message: str) -> None:
    """Print a line on stderr about what takes time."""
    print(f"mooring: {message}", file=sys.stderr, flush=True)


def unknown(kind: str, given: object, allowed: Iterable[str], rule: str | None = None) -> MooringError:
    """Return the error for a name that is not in a list; it suggests the nearest allowed name.

    Args:
        kind: what the name is of.
        given: the name.
        allowed: the list.
        rule: what to say in place of a list that is long.

    Example:
        >>> print(unknown("importance", "ewk", ["ewc", "mas"]))
        unknown importance 'ewk' (did you mean 'ewc'?); allowed: ewc, mas
    """
    names = list(allowed)
    matches = difflib.get_close_matches(str(given), names, n=1)
    hint = f" (did you mean {matches[0]!r}?)" if matches else ""
    return MooringError(f"unknown {kind} {given!r}{hint}; {rule or 'allowed: ' + ', '.join(names)}")


def check_number(name: str, value: object, low: float, high: float = math.inf, *, above: bool = False) -> None:
    """Refuse anything but a finite number from `low` to `high`; with above=True, `low` itself is refused too.

    Example:
        >>> check_number("damping", 0.0, 0, above=True)
        Traceback (most recent call last):
        ...
        mooring.errors.MooringError: damping=0.0 is not allowed: give a number above 0
    """
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not (low < value if above else low <= value) or value > high:  # type: ignore[operator]
        limits = f"{'above' if above else 'from'} {low:g}" + (f" to {high:g}" if high < math.inf else "")
        raise MooringError(f"{name}={value!r} is not allowed: give a number {limits}")


MAX_WHOLE = 10**12
"""Default upper limit of whole numbers; larger counts could overflow where they are stored."""


def check_whole(name: str, value: object, low: int, high: int = MAX_WHOLE) -> None:
    """Refuse anything but a whole number from `low` to `high`.

    Example:
        >>> check_whole("epochs", 0, 1)
        Traceback (most recent call last):
        ...
        mooring.errors.MooringError: epochs=0 is not allowed: give a whole number from 1
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise MooringError(f"{name}={value!r} is not allowed: give a whole number from {low}")
    if value > high:
        raise MooringError(f"{name}={value!r} is not allowed: give a whole number up to {high}")


def first_line(error: BaseException) -> str:
    r"""Return the first line of an error's message, or its class if there is none.

    Example:
        >>> first_line(RuntimeError("shapes differ.\nBacktrace: ...")), first_line(NotImplementedError())
        ('shapes differ', 'NotImplementedError')
    """
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


def first_and_count(names: list[str]) -> str:
    """Return the first name and the number of the others.

    Example:
        >>> first_and_count(["0.weight", "0.bias", "2.weight"])
        "'0.weight' and 2 others"
    """
    others = f" and {len(names) - 1} {'other' if len(names) == 2 else 'others'}" if names[1:] else ""
    return f"{names[0]!r}{others}"
