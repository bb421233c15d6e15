"""The number of tasks that have trained a parameter, as an importance."""

from typing import ClassVar

from mooring.rules import Uniform


class TaskCount(Uniform):
    """An importance of 1 per task; summed, it is the number of tasks that have trained a parameter.

    Example:
        >>> TaskCount().merges
        True
    """

    merges: ClassVar[bool] = True
