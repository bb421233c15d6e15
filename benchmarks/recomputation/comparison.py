"""One comparison of a written value with its recomputation."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?(?![\d.]*-[a-z])")
STORED_PRECISION = 2e-9
"""Relative rounding of the floats in `runs.json`."""


@dataclass(frozen=True)
class Disagreement:
    """A value that the files have, and another one that follows from the runs."""

    where: str
    written: Any
    recomputed: Any

    def __str__(self) -> str:
        return f"{self.where}: written {self.written!r}, recomputed {self.recomputed!r}"


def printed_numbers(text: str) -> list[str]:
    """Return the numbers of a text as they are printed.

    Example:
        >>> printed_numbers("-0.45 [-25.60, +24.70] over 13 pairs on cifar100 in 30-epochs")
        ['-0.45', '-25.60', '+24.70', '13']
    """
    return [number.rstrip(",") for number in NUMBER.findall(text)]


def rounds_to(value: float, printed: str) -> bool:
    """Return whether a number can be printed like this: it differs by at most half a unit of the last digit.

    Example:
        >>> rounds_to(0.125, "0.12"), rounds_to(0.13, "0.12"), rounds_to(1.04e-14, "1.0e-14")
        (True, False, True)
    """
    digits, _, exponent = printed.replace(",", "").partition("e")
    decimals = len(digits.partition(".")[2])
    unit = 10.0 ** (int(exponent or 0) - decimals)
    return abs(value - float(f"{digits}e{exponent or 0}")) <= unit * (0.5 + 1e-6) + STORED_PRECISION * abs(value)


def prints_numbers(text: str, numbers: Sequence[float]) -> bool:
    """Return whether a text has exactly these numbers, in order and to its own digits."""
    printed = printed_numbers(text)
    return len(printed) == len(numbers) and all(map(rounds_to, numbers, printed))
