"""Read numbers and seeds from the text of an option."""

from collections.abc import Sequence

from mooring.errors import MooringError
from mooring_lab.study.defaults import MAX_SEEDS


def parse_seeds(text: str, option: str = "--seeds") -> int | list[int]:
    """Return the number of seeds, or the seeds of a list or range.

    Example:
        >>> parse_seeds("5"), parse_seeds("0,3"), parse_seeds("2-4")
        (5, [0, 3], [2, 3, 4])
    """
    try:
        if text.strip().isdecimal() and 0 < int(text) <= MAX_SEEDS:
            return int(text)
        seeds: list[int] = []
        for part in (part for part in text.split(",") if part.strip()):
            first, _, last = part.partition("-")
            numbers = range(int(first), int(last or first) + 1)
            if numbers.stop - numbers.start > MAX_SEEDS:
                raise ValueError
            seeds += numbers
        if not seeds or not {",", "-"} & set(text):
            raise ValueError
        return list(dict.fromkeys(seeds))
    except ValueError:
        allowed = f"give how many (5) or which (0,3,7 or 0-4), at most {MAX_SEEDS}"
        raise MooringError(f"{option} {text} is not allowed: {allowed}") from None


def parse_numbers(option: str, text: str) -> list[float]:
    """Return numbers that are separated by commas.

    Example:
        >>> parse_numbers("--lrs", "0.1, 1e-3")
        [0.1, 0.001]
    """
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise MooringError(f"{option} {text} is not allowed: give numbers, separated by commas") from None


def parse_numbers_by_method(option: str, values: Sequence[str]) -> list[float] | float | dict[str, list[float]] | None:
    """Return numbers for all methods, or for single methods if given as METHOD=NUMBERS.

    Example:
        >>> parse_numbers_by_method("--strength", ["ewc=10,100", "mas=0.1"])
        {'ewc': [10.0, 100.0], 'mas': [0.1]}
        >>> parse_numbers_by_method("--lr", ["0.1"])
        0.1
    """
    if not values:
        return None
    if all("=" in value for value in values):
        by_method: dict[str, list[float]] = {}
        for name, _, text in (value.partition("=") for value in values):
            by_method.setdefault(name.strip(), []).extend(parse_numbers(option, text))
        return by_method
    if len(values) > 1:
        raise MooringError(f"{option} was given {len(values)} times: write METHOD=NUMBER in each, or give it once")
    common = parse_numbers(option, values[0])
    return common[0] if len(common) == 1 else common
