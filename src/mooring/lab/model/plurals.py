"""Words that go with numbers."""

__all__ = ["pluralize"]


def pluralize(number: int, thing: str) -> str:
    """So many things, in words.

    Example:
        >>> pluralize(1, "run"), pluralize(3, "run")
        ('1 run', '3 runs')
    """
    return f"{number} {thing}{'' if number == 1 else 's'}"
