"""Words that go with numbers."""

__all__ = ["counted"]


def counted(number: int, thing: str) -> str:
    """So many things, in words.

    Example:
        >>> counted(1, "run"), counted(3, "run")
        ('1 run', '3 runs')
    """
    return f"{number} {thing}{'' if number == 1 else 's'}"
