"""Counts with the right plural form."""


def pluralize(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless the number is 1.

    Example:
        >>> pluralize(1, "run"), pluralize(3, "run")
        ('1 run', '3 runs')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"
