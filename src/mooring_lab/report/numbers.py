"""Format numbers and names for people."""

import math
import re

from mooring_lab.model.metrics import Interval

MISSING = "\u2013"
"""The text of a missing number."""

_MINUS = "\u2212"


def fixed(value: float | None, digits: int = 2) -> str:
    """Format with a fixed number of decimals, a typographic minus sign, and a dash for a missing number.

    Example:
        >>> fixed(-1.234), fixed(float("nan")), fixed(float("inf"))
        ('−1.23', '–', '∞')
    """
    return _format(value, f".{digits}f")


def general(value: float | None) -> str:
    """Format with three significant digits.

    Example:
        >>> general(0.000123), general(1234.5), general(2e7), general(None)
        ('0.000123', '1234', '2e7', '–')
    """
    return _format(value, ".0f" if value is not None and 100 <= abs(value) < 1e6 else ".3g")


def given(value: float | None) -> str:
    """Format a number as a person would type it.

    Example:
        >>> given(1234.5), given(0.02), given(1e6)
        ('1234.5', '0.02', '1e6')
    """
    return _format(value, "g")


def count(value: float | None) -> str:
    """Format a count, with separators between thousands.

    Example:
        >>> count(101770.4)
        '101,770'
    """
    return _format(value, ",.0f")


def points(value: float) -> str:
    """Format a difference in percentage points, with its sign.

    Example:
        >>> points(1.25), points(-0.5)
        ('+1.25', '−0.50')
    """
    return _format(value, "+.2f")


def bounds(interval: Interval | None) -> str:
    """Format the 95 % interval, or a dash if there is none.

    Example:
        >>> bounds(Interval(71.5, 0.25, 71.0, 72.0, 4))
        '71.00 to 72.00'
    """
    return (
        MISSING if interval is None or math.isnan(interval.low) else f"{fixed(interval.low)} to {fixed(interval.high)}"
    )


def printable(text: str, longest: int = 200) -> str:
    r"""Replace control characters and lone surrogates, and cut a text that is too long.

    Example:
        >>> printable("a\0b"), printable("abcdef", 4)
        ('a�b', 'abc…')
    """
    shown = "".join(char if char.isprintable() else "\ufffd" for char in text)
    return shown if len(shown) <= longest else shown[: longest - 1] + "…"


def shortened(text: str, longest: int) -> str:
    """Cut the middle out of a text that is too long: similar names differ at their ends.

    Example:
        >>> shortened("my-own-method-number-12", 12)
        'my-own…er-12'
    """
    return text if len(text) <= longest else f"{text[: longest // 2]}…{text[len(text) - (longest - 1) // 2 :]}"


def _format(value: float | None, form: str) -> str:
    if value is None or math.isnan(value):
        return MISSING
    if math.isinf(value):
        return "∞" if value > 0 else f"{_MINUS}∞"
    text = format(value, form)
    if text.startswith("-") and not any(digit in text for digit in "123456789"):
        return text[1:]  # "-0.00" is a rounded zero and has no sign
    return re.sub(r"e(-?)\+?0*", r"e\1", text).replace("-", _MINUS)
