"""How numbers and names are written."""

import math
import re

from mooring.lab.model.metrics import Interval

__all__ = ["MISSING", "bounds", "count", "fixed", "general", "given", "points", "printable", "shortened"]

MISSING = "\u2013"
"""Stands where there is no number."""

_MINUS = "\u2212"


def fixed(value: float | None, digits: int = 2) -> str:
    """With so many decimals, a real minus sign, and a dash for what is not a number.

    Example:
        >>> fixed(-1.234), fixed(float("nan")), fixed(float("inf"))
        ('−1.23', '–', '∞')
    """
    return _written(value, f".{digits}f")


def general(value: float | None) -> str:
    """With three digits that matter.

    Example:
        >>> general(0.000123), general(1234.5), general(2e7), general(None)
        ('0.000123', '1234', '2e7', '–')
    """
    return _written(value, ".0f" if value is not None and 100 <= abs(value) < 1e6 else ".3g")


def given(value: float | None) -> str:
    """As somebody chose it.

    Example:
        >>> given(1234.5), given(0.02), given(1e6)
        ('1234.5', '0.02', '1e6')
    """
    return _written(value, "g")


def count(value: float | None) -> str:
    """A number of things, its thousands apart.

    Example:
        >>> count(101770.4)
        '101,770'
    """
    return _written(value, ",.0f")


def points(value: float) -> str:
    """A difference in percentage points, with its sign.

    Example:
        >>> points(1.25), points(-0.5)
        ('+1.25', '−0.50')
    """
    return _written(value, "+.2f")


def bounds(found: Interval | None) -> str:
    """The 95 % interval, or a dash where there is none.

    Example:
        >>> bounds(Interval(71.5, 0.25, 71.0, 72.0, 4))
        '71.00 to 72.00'
    """
    return MISSING if found is None or math.isnan(found.low) else f"{fixed(found.low)} to {fixed(found.high)}"


def printable(text: str, longest: int = 200) -> str:
    r"""Fit for any file: control characters and lone surrogates replaced, cut where it is too long to show.

    Example:
        >>> printable("a\0b"), printable("abcdef", 4)
        ('a�b', 'abc…')
    """
    shown = "".join(char if char.isprintable() else "\ufffd" for char in text)
    return shown if len(shown) <= longest else shown[: longest - 1] + "…"


def shortened(text: str, longest: int) -> str:
    """Without its middle where it is too long: names of a kind differ at their ends.

    Example:
        >>> shortened("my-own-method-number-12", 12)
        'my-own…er-12'
    """
    return text if len(text) <= longest else f"{text[: longest // 2]}…{text[len(text) - (longest - 1) // 2 :]}"


def _written(value: float | None, form: str) -> str:
    if value is None or math.isnan(value):
        return MISSING
    if math.isinf(value):
        return "∞" if value > 0 else f"{_MINUS}∞"
    written = format(value, form)
    if written.startswith("-") and not any(digit in written for digit in "123456789"):
        return written[1:]  # rounded to "-0.00", a sign it does not have
    return re.sub(r"e(-?)\+?0*", r"e\1", written).replace("-", _MINUS)
