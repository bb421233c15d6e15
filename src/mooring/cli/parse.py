"""How numbers and seeds are read from text."""

from collections.abc import Sequence

from mooring.errors import MooringError
from mooring.lab.study.comparison import MOST_SEEDS

__all__ = ["numbers", "numbers_by_method", "seeds"]


def seeds(text: str, option: str = "--seeds") -> int | list[int]:
    """How many seeds, or which.

    Example:
        >>> seeds("5"), seeds("0,3"), seeds("2-4")
        (5, [0, 3], [2, 3, 4])
    """
    try:
        if text.strip().isdecimal() and 0 < int(text) <= MOST_SEEDS:
            return int(text)
        found: list[int] = []
        for part in (part for part in text.split(",") if part.strip()):
            first, _, last = part.partition("-")
            found += _between(int(first), int(last or first))
        if not found or not {",", "-"} & set(text):
            raise ValueError
        return list(dict.fromkeys(found))
    except ValueError:
        allowed = f"say how many (5) or which (0,3,7 or 0-4), at most {MOST_SEEDS}"
        raise MooringError(f"{option} {text} is not allowed: {allowed}") from None


def _between(first: int, last: int) -> range:
    if last - first >= MOST_SEEDS:
        raise ValueError
    return range(first, last + 1)


def numbers(option: str, text: str) -> list[float]:
    """Numbers with commas.

    Example:
        >>> numbers("--lrs", "0.1, 1e-3")
        [0.1, 0.001]
    """
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise MooringError(f"{option} {text} is not allowed: give numbers, with commas between them") from None


def numbers_by_method(option: str, given: Sequence[str]) -> list[float] | float | dict[str, list[float]] | None:
    """Numbers for all methods, or for single ones as METHOD=NUMBERS.

    Example:
        >>> numbers_by_method("--strength", ["ewc=10,100", "mas=0.1"])
        {'ewc': [10.0, 100.0], 'mas': [0.1]}
        >>> numbers_by_method("--lr", ["0.1"])
        0.1
    """
    if not given:
        return None
    if all("=" in part for part in given):
        found: dict[str, list[float]] = {}
        for name, _, values in (part.partition("=") for part in given):
            found.setdefault(name.strip(), []).extend(numbers(option, values))
        return found
    if len(given) > 1:
        raise MooringError(f"{option} was given {len(given)} times: say METHOD=NUMBER in each, or give it once")
    common = numbers(option, given[0])
    return common[0] if len(common) == 1 else common
